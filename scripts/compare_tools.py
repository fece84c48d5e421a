"""Compares schedules on the quickstart with a tool that is as slow as published, scaled; the simulator beside it.

Live: four paced replicas, every call in the real sandbox, and then held back (examples/calculator/slow_tool.py).
Simulated: the same configuration, with what only a run can tell (lengths, calls, the trainer's speed) from the
`trajectory_level` run of the same seed.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import msgspec

from laminar.control.trajectory_state import TrajectoryState
from laminar.observe.event_log import segments
from laminar.observe.replay import plane_of
from laminar.observe.run_folder import read_run
from scripts.predict_tools import Measured, measure, predict
from scripts.quickstart_runs import RUNS, markdown_table, run_quickstart

CONFIG = "configs/quickstart_tools.yaml"
SCHEDULES = ("trajectory_level", "synchronous", "streaming", "partial_rollout")
COMMON = (
    "rollout.environment=examples/calculator/slow_tool.py:SlowTool",
    "rollout.num_replicas=4",
    "engine.paced.accelerator=h800-qwen2.5-32b-tp4",
    "engine.paced.time_scale=0.5",
    "engine.paced.batch_scale=8",
    "evaluation.interval_steps=null",
    "trainer.num_steps=12",
)
"""Four replicas, so that their batches together are a step's, under every schedule."""
HEADER = [
    "seed",
    "schedule",
    "s for all steps",
    "tokens/s",
    "replicas idle",
    "not decoding",
    "trainer idle",
    "at the tool",
    "simulated: tokens/s",
    "not decoding",
    "trainer idle",
]


class Shares(msgspec.Struct, frozen=True):
    """Of the seconds of a run.

    not_decoding: replicas' time in which their decode batch was empty, whatever they wait for. at_tool: time of
    unfinished trajectories in which they wait for the tool.
    """

    not_decoding: float
    at_tool: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--tabulate", action="store_true", help="start nothing; read the runs that are there")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that differ from the comparison's")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for seed in arguments.seeds:
        measured: Measured | None = None
        for schedule in SCHEDULES:
            name = f"compare_tools/{schedule}-{seed}"
            overrides = [f"seed={seed}", f"schedule.kind={schedule}", *COMMON, *arguments.overrides]
            if not arguments.tabulate:
                run_quickstart(name, *overrides, config=CONFIG)
            measured = measured or measure(RUNS / name)
            rows.append([str(seed), schedule, *live(RUNS / name), *predict(RUNS / name, measured)])
            print(rows[-1], flush=True)
    print(markdown_table(HEADER, rows))


def live(run_dir: Path) -> list[str]:
    summary, shares = read_run(run_dir).summary, shares_of(run_dir)
    return [
        f"{summary.train_s:.0f}",
        f"{summary.tokens_per_s:,.0f}",
        f"{summary.idle_ratio.replicas:.2f}",
        f"{shares.not_decoding:.2f}",
        f"{summary.idle_ratio.trainer:.2f}",
        f"{shares.at_tool:.2f}",
    ]


def shares_of(run_dir: Path) -> Shares:
    """From the run's events, each state weighted by the time until the next one, from the first batch on."""
    replica_s = empty_s = trajectory_s = tool_s = 0.0
    for segment in segments(run_dir):
        plane = plane_of(segment.header)
        for record, following in pairwise(segment.records):
            plane.handle(record.event, record.now)
            seconds, counts = following.now - record.now, plane.state.counts(evaluation=False)
            at_tool = counts[TrajectoryState.WAITING_FOR_TOOL]
            unfinished = at_tool + counts[TrajectoryState.DECODING] + counts[TrajectoryState.QUEUED]
            trajectory_s += seconds * unfinished
            tool_s += seconds * at_tool
            if plane.state.ledger.dispatched:
                replicas = plane.state.replicas.values()
                replica_s += seconds * len(replicas)
                empty_s += seconds * sum(replica.num_running + replica.num_waiting == 0 for replica in replicas)
    return Shares(empty_s / replica_s, tool_s / trajectory_s)


if __name__ == "__main__":
    main()
