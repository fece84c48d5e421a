"""What a killed run leaves behind is ended by the next one; nothing else ever is."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from laminar.cluster import processes
from laminar.cluster.processes import Process, ProcessRegistry, Registered, end_dead_runs, registry_folder

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The registry of these tests only: no run of this machine is seen, let alone ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return registry_folder()


class Driver:
    """A run's driver and its worker, both processes of their own."""

    def __init__(self, run_id: str, ray_folder: Path) -> None:
        ray_folder.mkdir()
        (ray_folder / "gcs.log").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.run_driver", run_id, str(ray_folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.worker = psutil.Process(int(self.process.stdout.readline()))

    def kill(self, *, reap: bool = True) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        if reap:
            self.process.wait(DEADLINE_S)
        else:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        if self.worker.is_running():
            self.worker.kill()
        self.process.kill()
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    def start(run_id: str) -> Driver:
        started.append(Driver(run_id, tmp_path / f"ray-{run_id}"))
        return started[-1]

    yield start
    for driver in started:
        driver.end()


def is_gone(process: psutil.Process) -> bool:
    """Within the deadline. It was reparented, so one that has ended may wait for a while to be reaped."""
    until = time.monotonic() + DEADLINE_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def test_what_a_killed_run_left_is_ended(start, folder, tmp_path):
    driver = start("dead")
    driver.kill()
    assert driver.worker.is_running(), "it would have ended by itself, so this shows nothing"
    assert end_dead_runs() == 1
    assert is_gone(driver.worker)
    assert not (tmp_path / "ray-dead").exists()
    assert list(folder.iterdir()) == []
    assert end_dead_runs() == 0


def test_a_killed_driver_that_nobody_reaped_is_dead(start):
    """Its parent, a shell or a scheduler, may never ask for its status."""
    driver = start("zombie")
    driver.kill(reap=False)
    assert psutil.Process(driver.process.pid).status() == psutil.STATUS_ZOMBIE
    assert end_dead_runs() == 1
    assert is_gone(driver.worker)


def test_a_run_that_goes_on_is_left_alone(start, tmp_path):
    alive, dead = start("alive"), start("dead")
    dead.kill()
    assert end_dead_runs() == 1
    assert is_gone(dead.worker)
    assert alive.worker.is_running()
    assert alive.process.poll() is None
    assert (tmp_path / "ray-alive" / "gcs.log").exists()
    alive.kill()
    assert end_dead_runs() == 1, "its file was lost"


def test_a_process_that_got_the_pid_of_one_that_ended_is_left_alone(start, folder):
    stranger = start("alive").worker
    driver = start("dead")
    driver.kill()
    path = folder / "dead.json"
    registered = msgspec.json.decode(path.read_bytes(), type=Registered)
    registered.processes.append(Process(stranger.pid, 12345))
    path.write_bytes(msgspec.json.encode(registered))
    assert end_dead_runs() == 1
    assert is_gone(driver.worker)
    assert stranger.is_running()


def test_a_driver_whose_pid_another_process_has_is_dead(start, folder):
    driver = start("dead")
    driver.kill()
    path = folder / "dead.json"
    registered = msgspec.json.decode(path.read_bytes(), type=Registered)
    registered.driver = Process(os.getpid(), registered.driver.started_ticks)
    path.write_bytes(msgspec.json.encode(registered))
    assert end_dead_runs() == 1
    assert is_gone(driver.worker)


def test_a_clock_that_was_set_makes_no_process_another(start, monkeypatch):
    """Laptops sleep and clocks are corrected: a running run must not look dead, nor a dead one's processes foreign."""
    alive, dead = start("alive"), start("dead")
    dead.kill()
    boot_time = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time + 3600)
    assert end_dead_runs() == 1
    assert is_gone(dead.worker)
    assert alive.worker.is_running()


def test_the_end_of_a_run_ends_its_stragglers_and_its_file(folder, tmp_path):
    straggler = subprocess.Popen(["sleep", "60"])
    registry = ProcessRegistry("mine")
    registry.add(straggler.pid)
    registry.add(2**22 + 1)  # no such process: it has ended already
    assert registry.pids() == {straggler.pid}
    assert [path.name for path in folder.iterdir()] == ["mine.json"]
    registry.close()
    assert straggler.wait(DEADLINE_S) == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_read_is_no_obstacle(folder):
    (folder / "garbage.json").write_text("{")
    (folder / "other.json").write_text('{"driver": 1}')
    assert end_dead_runs() == 0


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    """Whoever owns it could name processes that we would then end."""
    monkeypatch.setattr(processes.os, "getuid", lambda: 12345)
    registry = folder.with_name("laminar-12345")
    registry.mkdir()
    with pytest.raises(ValueError, match=r"belongs to another user.*set TMPDIR"):
        registry_folder()
