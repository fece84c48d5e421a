"""Runs the quickstart with overrides, one run after the other, and collects what each came to."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from laminar.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"
DEADLINE_S = 1200.0


def run_quickstart(
    name: str,
    *overrides: str,
    config: str = "configs/quickstart.yaml",
    kill_replica_at_step: int | None = None,
) -> dict[str, Any]:
    """One run in runs/<name>; returns its summary. A run that fails raises, with its last words.

    kill_replica_at_step: `kill -9` one of the replicas as soon as this step is done.
    """
    command = [sys.executable, "-m", "laminar", "run", config, "--fresh", f"run_dir=runs/{name}"]
    log = RUNS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        run = subprocess.Popen([*command, *overrides], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        if kill_replica_at_step is not None:
            _kill_replica(run, RUNS / name, kill_replica_at_step)
        run.wait(DEADLINE_S)
    if run.returncode:
        raise RuntimeError(f"the run {name} failed; the end of {log}:\n{log.read_text()[-2000:]}")
    return json.loads((RUNS / name / "summary.json").read_text())


def _kill_replica(run: "subprocess.Popen[bytes]", run_dir: Path, step: int) -> None:
    replicas: list[psutil.Process] = []
    until = time.monotonic() + DEADLINE_S
    while not (replicas and any(row.step >= step for row in read_metrics(run_dir))):
        if run.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{run_dir} did not come to step {step}")
        time.sleep(0.2)
        # An earlier run's metrics may lie here until this one has its processes.
        replicas = [p for p in psutil.Process(run.pid).children(recursive=True) if "RolloutActor" in p.name()]
    replicas[0].kill()
    print(f"killed {replicas[0].pid}, one of {len(replicas)} replicas, after step {step}", flush=True)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
