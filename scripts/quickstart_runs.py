"""Runs the quickstart with overrides, one run after the other, and collects what each came to."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"
DEADLINE_S = 1200.0


def run_quickstart(name: str, *overrides: str, config: str = "configs/quickstart.yaml") -> dict[str, Any]:
    """One run in runs/<name>; returns its summary. A run that fails raises, with its last words."""
    command = [sys.executable, "-m", "laminar", "run", config, "--fresh", f"run_dir=runs/{name}"]
    done = subprocess.run(
        [*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the run {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads((RUNS / name / "summary.json").read_text())


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
