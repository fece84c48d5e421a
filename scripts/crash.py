"""Kills a run with -9 at random moments, saving included, resumes it each time, and checks that nothing shows.

    make crash        (python -m scripts.crash --num-kills 20)

Checked: every start restores a complete checkpoint whose tensors have the checksums that the saving process took of
them in memory; fed the responses that the journal held, the step after it is the same bit for bit; and in the history
that survived (scripts/crash_history.py) each prompt is trained once an epoch, and steps, learning rates and metrics
neither skip nor repeat.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from scripts.crash_history import check_history
from scripts.crash_step import RecordedStep

NUM_PROMPTS_PER_STEP = 4
NUM_EPOCHS = 2
NUM_STEPS_PER_KILL = 4
"""That a start gets no further than this keeps the run from ending before its last kill."""
SETTINGS = (
    "engine.paced=null",
    "engine.kv_capacity_tokens=8192",
    "rollout.num_replicas=2",
    "rollout.num_groups_per_replica_max=2",
    f"batch.num_prompts_per_step={NUM_PROMPTS_PER_STEP}",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    f"data.num_epochs={NUM_EPOCHS}",
    "data.val_files=[]",
    "evaluation.interval_steps=null",
    "trainer.num_steps=null",
    "trainer.learning_rate_schedule=constant",
    # Longer than the run, so that the learning rate counts its updates.
    "trainer.num_warmup_updates=1000",
    "checkpoint.interval_steps=1",
    "checkpoint.num_kept=1000",
    "observe.tensorboard=false",
)
START_DEADLINE_S = 300.0
WAY_DEADLINE_S = 300.0
POLL_S = 0.005


class Kill(msgspec.Struct, frozen=True):
    """When a start is killed: so long after its num_mini_batches-th mini-batch, or after it began to write a
    checkpoint. whole: all its processes at once, or the driver alone, which takes the others with it."""

    num_mini_batches: int
    while_saving: bool
    delay_s: float
    whole: bool
    num_ranks: int


class Outcome(msgspec.Struct, frozen=True):
    restored_step: int
    next_step_same: bool | None
    """None: the journal did not hold all that the next step was trained on, or other ranks trained it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random moments, resume it, check that nothing shows.")
    parser.add_argument("--num-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/crash"))
    arguments = parser.parse_args(argv)
    kills = plan(arguments.num_kills, arguments.seed)
    outcomes = crash(arguments.run_dir, kills, print)
    same = [outcome.next_step_same for outcome in outcomes]
    print(f"{len(kills)} kills; every restored state has the checksums that it was saved with; the next step is the")
    print(f"same bit for bit in {same.count(True)} of {len(same) - same.count(None)} that could be compared;")
    print("every prompt was trained once an epoch; steps, learning rates and metrics neither skip nor repeat")
    return 0 if False not in same else 1


def plan(num_kills: int, seed: int) -> list[Kill]:
    """Every second one while a checkpoint is written, every fifth of a trainer with two ranks."""
    draw = random.Random(seed)
    return [
        Kill(
            num_mini_batches=draw.randint(0, 2 * (NUM_STEPS_PER_KILL - 1) - 1),
            while_saving=number % 2 == 1,
            delay_s=draw.uniform(0.0, 0.03) if number % 2 else draw.uniform(0.0, 0.4),
            whole=draw.random() < 0.7,
            num_ranks=2 if number % 5 == 2 else 1,
        )
        for number in range(num_kills)
    ]


def crash(run_dir: Path, kills: Sequence[Kill], tell: Callable[[str], None]) -> list[Outcome]:
    """Start, kill and resume; then let the run end, and check its history. Raises AssertionError for what shows."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    num_prompts = _write_prompts(run_dir / "prompts.jsonl", len(kills))
    outcomes: list[Outcome] = []
    recorded: RecordedStep | None = None
    for number, kill in enumerate((*kills, None)):
        ranks = kill.num_ranks if kill is not None else 1
        start = Start(run_dir, ["--resume"] if number else [], ranks)
        try:
            if kill is not None:
                start.wait_for(kill)
                start.kill(whole=kill.whole)
            else:
                start.wait_for_end()
        finally:
            start.kill(whole=True)
        if recorded is not None:
            outcomes.append(Outcome(recorded.restored_step(), recorded.same_again() if ranks == 1 else None))
            tell(f"resumed at step {outcomes[-1].restored_step}; next step the same: {outcomes[-1].next_step_same}")
        if kill is not None:
            recorded = RecordedStep(run_dir, run_dir / f"recorded_{number}")
            tell(f"kill {number + 1} of {len(kills)}: {kill}")
    check_history(run_dir, num_steps=NUM_EPOCHS * num_prompts // NUM_PROMPTS_PER_STEP)
    return outcomes


class Start:
    """One start of the run, until it is killed or ends."""

    def __init__(self, run_dir: Path, options: Sequence[str], num_ranks: int) -> None:
        self._run_dir = run_dir
        self._num_logs_before = len(list((run_dir / "events").glob("*.jsonl")))
        settings = (*SETTINGS, f"run_dir={run_dir}", f"data.train_files=[{run_dir}/prompts.jsonl]")
        command = [sys.executable, "-m", "laminar", "run", "configs/quickstart.yaml", *settings, *options]
        self._output = (run_dir / "output.txt").open("a")
        self._process = subprocess.Popen(
            [*command, f"trainer.num_ranks={num_ranks}"],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for(self, kill: Kill) -> None:
        """Until its moment has come."""
        self._wait(START_DEADLINE_S, "the trainer's start", lambda: self._count("TrainerStarted") > 0)
        num = kill.num_mini_batches
        self._wait(WAY_DEADLINE_S, f"{num} mini-batches", lambda: self._count("MiniBatchTrained") >= num)
        if kill.while_saving:
            num_copied = self._count("CheckpointCopied")
            self._wait(WAY_DEADLINE_S, "a checkpoint", lambda: self._count("CheckpointCopied") > num_copied)
        time.sleep(kill.delay_s)

    def wait_for_end(self) -> None:
        status = self._process.wait(START_DEADLINE_S + WAY_DEADLINE_S)
        assert status == 0, f"the last start failed; its output is in {self._output.name}"

    def kill(self, *, whole: bool) -> None:
        """Kill -9; when this returns none of its processes is left to write anything."""
        try:
            driver = psutil.Process(self._process.pid)
            processes = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes if whole else processes[:1]:
            _kill(process)
        self._process.wait()
        _, left = psutil.wait_procs(processes, timeout=0 if whole else 20)
        for process in left:
            _kill(process)
        psutil.wait_procs(left, timeout=20)
        self._output.close()

    def _wait(self, deadline_s: float, what: str, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + deadline_s
        while not reached():
            assert self._process.poll() is None, f"the run ended before {what}; its output is in {self._output.name}"
            assert time.monotonic() < until, f"{what} did not come within {deadline_s:g} s"
            time.sleep(POLL_S)

    def _count(self, event: str) -> int:
        """How many of these events this start has logged so far."""
        files = sorted((self._run_dir / "events").glob("*.jsonl"))[self._num_logs_before :]
        return sum(file.read_bytes().count(f'"event":"{event}"'.encode()) for file in files)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def _write_prompts(path: Path, num_kills: int) -> int:
    """As many as the steps that the kills leave, a short last step aside; returns their number."""
    num_steps = NUM_STEPS_PER_KILL * (num_kills + 1)
    num_prompts = NUM_PROMPTS_PER_STEP * -(-num_steps // NUM_EPOCHS)
    rows = [
        {
            "prompt": f"f(x)=x+{i % 9 + 1} mod 10. x={i % 10}. Apply f {i // 10 % 9 + 1:02} times.\n",
            "data_source": "iterate",
            "reward_model": {"ground_truth": str((i % 10 + (i % 9 + 1) * (i // 10 % 9 + 1)) % 10)},
        }
        for i in range(num_prompts)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return num_prompts


if __name__ == "__main__":
    sys.exit(main())
