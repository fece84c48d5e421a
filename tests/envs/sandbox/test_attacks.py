"""Fifty attacks of eight kinds: none gets through, with either backend, as root and without rights."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from laminar.envs.sandbox.attacks import ESCAPED
from laminar.envs.sandbox.sandbox import Outcome
from laminar.envs.sandbox.selftest import SandboxBroken, prove, target
from tests.envs.sandbox.battery import ATTACKS
from tests.envs.sandbox.machine import BACKENDS

ROOT = Path(__file__).parents[3]
UNPRIVILEGED = 64_321
SYSTEM_PYTHON = Path("/usr/bin/python3")
OUTSIDE = [attack for attack in ATTACKS if attack.works_outside]


def test_the_battery_is_of_eight_kinds():
    kinds = Counter(attack.kind for attack in ATTACKS)
    assert len(ATTACKS) >= 50
    assert len(kinds) == 8
    assert min(kinds.values()) >= 3


@pytest.mark.parametrize("rights", ["as we are", "without rights"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_attack_gets_through(backend, rights):
    command, user = [sys.executable, "-m", "tests.envs.sandbox.run_battery", backend], None
    if rights == "without rights":
        if os.getuid() != 0:
            pytest.skip("we are without rights already")
        if not SYSTEM_PYTHON.exists():
            pytest.skip(f"{SYSTEM_PYTHON} is not there, and ours may be unreadable to others")
        command[0], user = str(SYSTEM_PYTHON), UNPRIVILEGED
    ran = subprocess.run(
        command,
        cwd=ROOT,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "Permission denied" in ran.stderr and user is not None and "outcome" not in ran.stdout:
        pytest.skip(f"another user cannot read {ROOT}")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    if "lacks" in report:
        pytest.skip(f"this machine has no {backend} sandbox: {report['lacks']}")
    assert report["flaws"] == []
    assert report["num_attacks"] == len(ATTACKS)
    assert report["uid"] == (os.getuid() if user is None else user)


@pytest.mark.parametrize("attack", OUTSIDE, ids=lambda attack: f"{attack.kind}: {attack.name}")
def test_the_same_attack_succeeds_outside(attack, tmp_path):
    """Else that it fails inside shows nothing."""
    if attack.name == "io_uring, which no filter sees" and _io_uring_is_off():
        pytest.skip("this kernel has no io_uring")
    with target() as aim:
        ran = subprocess.run(
            [sys.executable, "-c", attack.program(aim)],
            cwd=tmp_path,
            env={**os.environ, "SECRET": aim.secret},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ESCAPED in ran.stdout, ran.stderr


def _io_uring_is_off() -> bool:
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    return not setting.exists() or setting.read_text().strip() != "0"


class Unconfined:
    """Runs code as any subprocess."""

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        try:
            ran = subprocess.run(  # noqa: ASYNC221
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=wall_s or 30, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome("timeout", "", wall_s or 30)
        return Outcome("ok" if ran.returncode == 0 else "error", ran.stdout, 0.0)

    async def close(self) -> None: ...


class Notebook(Unconfined):
    """The same, but it shows the last value, so the first question is answered as it should be."""

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        if code.endswith("2**10"):
            return Outcome("ok", "stands\n1024\n", 0.0)
        return await super().run(code, wall_s=wall_s)


async def test_the_self_test_refuses_what_does_not_confine():
    with pytest.raises(SandboxBroken, match="does not stop network: a TCP connection: it got through"):
        await prove(Notebook())


async def test_the_self_test_refuses_what_does_not_run():
    with pytest.raises(SandboxBroken, match="does not run code"):
        await prove(Unconfined())
