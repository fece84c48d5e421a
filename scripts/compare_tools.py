"""Compares schedules on the quickstart with a tool whose latencies are the published ones, scaled; paced engines."""

import argparse
from typing import Any

from laminar.observe.metrics import read_metrics
from scripts.quickstart_runs import RUNS, markdown_table, run_quickstart

SCHEDULES = ("trajectory_level", "synchronous")
COMMON = (
    "rollout.environment=examples/calculator/slow_tool.py:SlowTool",
    "engine.paced.accelerator=h800-qwen2.5-32b-tp4",
    "engine.paced.time_scale=0.2",
    "engine.paced.batch_scale=8",
    "evaluation.interval_steps=null",
    "trainer.num_steps=15",
)
HEADER = ["seed", "schedule", "s for all steps", "tokens/s", "replicas idle", "trainer idle", "waiting for the tool"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for seed in arguments.seeds:
        for schedule in arguments.schedules:
            name = f"compare_tools/{schedule}-{seed}"
            overrides = (f"seed={seed}", f"schedule.kind={schedule}", *COMMON)
            summary = run_quickstart(name, *overrides, config="configs/quickstart_tools.yaml")
            rows.append([str(seed), schedule, *row(summary, name)])
            print(rows[-1], flush=True)
    print(markdown_table(HEADER, rows))


def row(summary: dict[str, Any], name: str) -> list[str]:
    idle = summary["idle_ratio"]
    return [
        f"{summary['train_s']:.0f}",
        f"{summary['tokens_per_s']:,.0f}",
        f"{idle['replicas']:.2f}",
        f"{idle['trainer']:.2f}",
        f"{share_waiting(name):.2f}",
    ]


def share_waiting(name: str) -> float:
    """Of the trajectories in flight as each step ended, mean over the steps."""
    pairs = [
        (row.values["rollout/num_waiting_for_tool"] or 0.0, row.values["pool/in_flight"] or 0.0)
        for row in read_metrics(RUNS / name)
        if "rollout/num_waiting_for_tool" in row.values
    ]
    in_flight = sum(number for _, number in pairs)
    return sum(waiting for waiting, _ in pairs) / in_flight if in_flight else 0.0


if __name__ == "__main__":
    main()
