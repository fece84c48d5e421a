import subprocess
import sys
import threading
import time
from collections.abc import Iterable

import pytest

from laminar.observe import resources
from laminar.observe.resources import MemorySampler, tree_pss_bytes

HOLDER = "import time; held = bytearray(b'x') * (96 << 20); print('ready', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"


def hold_memory() -> subprocess.Popen[str]:
    """A process whose child holds 96 MiB."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    return parent


def end(parent: subprocess.Popen[str]) -> None:
    children = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True, check=False)
    for pid in children.stdout.split():
        subprocess.run(["kill", "-9", pid], check=True)
    parent.wait(10)


def test_the_whole_tree_is_summed_and_each_process_counts_once():
    parent = hold_memory()
    try:
        held = tree_pss_bytes([parent.pid])
        assert 96 << 20 < held < 200 << 20
        assert abs(tree_pss_bytes([parent.pid, parent.pid]) - held) < 4 << 20
    finally:
        end(parent)
    assert tree_pss_bytes([parent.pid]) == 0


def test_the_peak_is_kept_when_memory_is_given_back():
    parent = hold_memory()
    sampler = MemorySampler([parent.pid], interval_s=0.02)
    deadline_s = time.monotonic() + 10
    while not sampler.peak_pss_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)
    end(parent)
    assert sampler.stop() > 96 << 20


def test_a_sample_of_twenty_five_processes_costs_little():
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(25)]
    try:
        begin_s = time.process_time()
        for _ in range(5):
            assert tree_pss_bytes([process.pid for process in processes]) > 0
        assert (time.process_time() - begin_s) / 5 < 0.05
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def test_a_sample_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """The run that it was taken of has ended well."""
    reached, go_on = threading.Event(), threading.Event()

    def be_slow(root_pids: Iterable[int]) -> int:
        reached.set()
        assert go_on.wait(10)
        return 1

    monkeypatch.setattr(resources, "tree_pss_bytes", be_slow)
    monkeypatch.setattr(resources, "STOP_DEADLINE_S", 0.05)
    sampler = MemorySampler([1])
    assert reached.wait(10)
    assert sampler.stop() == 0
    go_on.set()
