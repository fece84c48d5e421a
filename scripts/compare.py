"""Compares schedules on the quickstart's paced configuration; draws docs/images/schedules.svg.

The runs of one seed follow each other, so that what else the machine does weighs on all of them alike.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from laminar.observe.metrics import read_metrics
from scripts.quickstart_runs import ROOT, RUNS, markdown_table, run_quickstart

KINDS = {
    "trajectory_level": ("schedule.kind=trajectory_level",),
    "synchronous": ("schedule.kind=synchronous",),
}
COMMON = ("trainer.num_steps=40", "evaluation.interval_steps=null")
"""Enough steps to pass reward 0.8; no evaluation, which takes a replica away from training for a while."""
NUM_STEPS_OF_MEAN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    summaries: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds:
        for kind, overrides in KINDS.items():
            name = f"compare/{kind}-{seed}"
            summaries[kind, seed] = run_quickstart(name, f"seed={seed}", *COMMON, *overrides)
            print(kind, seed, summaries[kind, seed]["time_to_reward_0_8_s"], flush=True)
    print(table(summaries, seeds))
    (RUNS / "compare" / "summaries.json").write_text(json.dumps({f"{k}-{s}": v for (k, s), v in summaries.items()}))
    draw(seeds, ROOT / "docs" / "images" / "schedules.svg")


def table(summaries: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> str:
    rows = [
        [
            str(seed),
            kind,
            _seconds(summary["time_to_reward_0_8_s"]),
            f"{summary['train_s']:.0f}",
            f"{summary['tokens_per_s']:,.0f}",
            f"{summary['idle_ratio']['replicas']:.2f}",
            f"{summary['idle_ratio']['trainer']:.2f}",
            f"{kv_utilization(f'compare/{kind}-{seed}'):.2f}",
            str(summary["num_repack_moves"]),
        ]
        for seed in seeds
        for kind in KINDS
        for summary in [summaries[kind, seed]]
    ]
    header = ["seed", "schedule", "s to reward 0.8", "s for all steps", "tokens/s"]
    return markdown_table([*header, "replicas idle", "trainer idle", "KV utilization", "repack moves"], rows)


def kv_utilization(name: str) -> float:
    """Mean over the steps, of all replicas as each step ended."""
    values = [row.values.get("rollout/kv_utilization") for row in read_metrics(RUNS / name)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def draw(seeds: list[int], path: Path) -> None:
    """Reward (mean of five steps) against time, a line a run."""
    from matplotlib import pyplot  # only in the development environment

    colours = {"trajectory_level": "#0072b2", "synchronous": "#d55e00"}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, colour in colours.items():
        for seed in seeds:
            rows = [row for row in read_metrics(RUNS / f"compare/{kind}-{seed}") if "critic/rewards/mean" in row.values]
            rewards = [row.values["critic/rewards/mean"] or 0.0 for row in rows]
            window = [rewards[max(0, i - NUM_STEPS_OF_MEAN + 1) : i + 1] for i in range(len(rewards))]
            means = [sum(part) / len(part) for part in window]
            seconds = [row.now - rows[0].now for row in rows]
            axes.plot(seconds, means, color=colour, alpha=0.8, label=kind if seed == seeds[0] else None)
    axes.axhline(0.8, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("reward, mean of 5 steps")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    main()
