"""The sandbox that a configuration asks for, or a refusal that says what is missing."""

import pytest

from laminar.config import HttpSandboxConfig, LocalSandboxConfig
from laminar.envs.sandbox import build, http
from laminar.envs.sandbox.build import reach_sandbox, start_sandbox
from laminar.envs.sandbox.channel import Address
from laminar.envs.sandbox.client import SharedSandbox
from laminar.envs.sandbox.http import HttpSandbox
from laminar.envs.sandbox.inside import landlock
from laminar.envs.sandbox.selftest import SandboxBroken
from tests.envs.sandbox.machine import BACKENDS, lacking


@pytest.fixture
async def _some_backend():
    if all([await lacking(backend) for backend in BACKENDS]):
        pytest.skip("this machine has no sandbox")


@pytest.mark.usefixtures("_some_backend")
async def test_by_default_the_best_that_this_machine_has_is_started_and_proved():
    sandbox = await start_sandbox(LocalSandboxConfig(num_slots=1))
    assert (await sandbox.run("1+1")).output == "2\n"
    await sandbox.close()


async def test_without_any_backend_nothing_is_run_and_each_lack_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(ValueError, match="no sandbox for the code of models") as caught:
        await start_sandbox(LocalSandboxConfig())
    assert "apt-get install bubblewrap" in str(caught.value)
    assert "no Landlock" in str(caught.value)
    assert "never run without one" in str(caught.value)


async def test_bubblewrap_that_may_not_make_namespaces_gives_way_to_landlock(monkeypatch):
    """As in a container without the right to."""
    if (lacks := await lacking("landlock")) is not None:
        pytest.skip(lacks)
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/bin/false")
    sandbox = await start_sandbox(LocalSandboxConfig(num_slots=1))
    assert (await sandbox.run("1+1")).output == "2\n"
    await sandbox.close()
    with pytest.raises(ValueError, match="bubblewrap: the sandbox's process ended"):
        await start_sandbox(LocalSandboxConfig(backend="bubblewrap"))


@pytest.mark.usefixtures("_some_backend")
async def test_a_sandbox_that_lets_an_attack_through_is_refused_and_not_replaced_by_another(monkeypatch):
    async def fail(sandbox):
        raise SandboxBroken("the sandbox does not stop network: a TCP connection: it got through")

    monkeypatch.setattr(build, "prove", fail)
    with pytest.raises(ValueError, match=r"does not stop network: a TCP connection.*No code is run in it"):
        await start_sandbox(LocalSandboxConfig(num_slots=1))


async def test_an_interpreter_that_cannot_be_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"sandbox\.python: no interpreter can be run.*nowhere"):
        await start_sandbox(LocalSandboxConfig(python=tmp_path / "nowhere"))


@pytest.mark.usefixtures("_some_backend")
async def test_a_module_to_preload_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        await start_sandbox(LocalSandboxConfig(num_slots=1, preloaded=("nowhere",)))


async def test_a_service_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(http, "RETRY_S", 0.001)
    with pytest.raises(ValueError, match=r"sandbox\.url=http://127\.0\.0\.1:1: .*ConnectError"):
        await start_sandbox(HttpSandboxConfig(kind="http", url="http://127.0.0.1:1"))


async def test_a_replica_reaches_its_machine_s_sandbox_or_the_service():
    address = Address("run", 3, b"token")
    assert isinstance(reach_sandbox(LocalSandboxConfig(), address), SharedSandbox)
    service = reach_sandbox(HttpSandboxConfig(kind="http", url="http://127.0.0.1:1"), address)
    assert isinstance(service, HttpSandbox)
    await service.close()
