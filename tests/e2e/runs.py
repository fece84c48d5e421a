"""Starts whole runs as a user would: the command line, real processes, in a folder of the test's own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).parents[2]
UNPACED = ("engine.paced=null", "engine.kv_capacity_tokens=8192")
SMALL = (
    "rollout.num_replicas=2",
    "rollout.num_groups_per_replica_max=2",
    "batch.num_prompts_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "evaluation.num_prompts_max=8",
    "evaluation.interval_steps=2",
    "checkpoint.interval_steps=2",
    "observe.tensorboard=false",
)
"""Overrides that make the quickstart a run of seconds."""
DEADLINE_S = 150.0


class Run:
    """`laminar run configs/quickstart.yaml …` as a process of its own."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        config: str = "configs/quickstart.yaml",
        overrides: Sequence[str] = (*UNPACED, *SMALL),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.run_dir = run_dir
        self._deadline_s = deadline_s
        command = [sys.executable, "-m", "laminar", "run", config, *overrides, f"run_dir={run_dir}", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def wait(self) -> str:
        """Until it ends; returns what it printed."""
        output, _ = self.process.communicate(timeout=self._deadline_s)
        return output

    @property
    def status(self) -> int:
        assert self.process.returncode is not None, "the run goes on"
        return self.process.returncode

    def kill(self) -> None:
        """kill -9 of the driver alone, as the OOM killer would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=self._deadline_s)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the event log says so far; commands can be asked for too."""
        return [message for found, message in self.messages() if found == kind]

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events and the commands that they led to, by their names, in order."""
        for line in self._log():
            if "event" in line:
                yield line["event"]["event"], line["event"]
            for command in line.get("commands", ()):
                yield command["command_type"], command

    def _log(self) -> Iterator[dict[str, Any]]:
        """Without headers; a last line that is not whole yet is left out."""
        for path in sorted((self.run_dir / "events").glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[1:]:
                try:
                    yield msgspec.json.decode(line)
                except msgspec.DecodeError:
                    continue

    def wait_for(self, what: str, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + self._deadline_s
        while not reached():
            assert self.process.poll() is None, f"the run ended before {what}: {self.process.communicate()[0]}"
            assert time.monotonic() < until, f"{what} did not come within {self._deadline_s} s"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """The driver and everything that descends from it."""
        try:
            driver = psutil.Process(self.process.pid)
            return [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def actor_process(run: Run, name: str) -> psutil.Process:
    """A process of the run that Ray shows under this actor's name."""
    return next(p for p in run.processes() if any(f"ray::{name}" in word for word in p.cmdline()))


def actor_processes(run: Run, name: str) -> list[psutil.Process]:
    """All of them, in the order in which they were started."""
    named = [p for p in run.processes() if any(f"ray::{name}" in word for word in p.cmdline())]
    return sorted(named, key=lambda process: (process.create_time(), process.pid))


def survivors(processes: list[psutil.Process], within_s: float = 20.0) -> list[str]:
    """Those that still run after the deadline."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in alive if p.is_running()]
