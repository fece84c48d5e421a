"""Compares repack on with off, live, where tails of one version meet: six replicas, small batches.

With the quickstart's own four replicas a version seldom lives on two of them at once, so few tails can be merged. Here
a step is the work of eight batches, two groups each, and B allows what a step of three times batch 1's time does.
"""

import argparse
import json

from scripts.quickstart_runs import RUNS, markdown_table, run_quickstart

COMMON = (
    "trainer.num_steps=60",
    "evaluation.interval_steps=null",
    "rollout.num_replicas=6",
    "rollout.num_groups_per_replica_max=2",
    "repack.check_interval_s=0.1",
    "repack.decode_latency_tolerance=3",
)
PHASES = ("generating", "tail", "repacked", "loading", "idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    rows: list[list[str]] = []
    summaries = []
    for seed in parser.parse_args().seeds:
        for enabled in ("true", "false"):
            name = f"compare_repack/{seed}-{enabled}"
            summary = run_quickstart(name, f"seed={seed}", f"repack.enabled={enabled}", *COMMON)
            summaries.append(summary)
            time_ratio = summary["replicas_time_ratio"]
            rows.append(
                [
                    str(seed),
                    "on" if enabled == "true" else "off",
                    f"{summary['train_s']:.0f}",
                    f"{summary['tokens_per_s']:,.0f}",
                    str(summary["num_repack_moves"]),
                    *(f"{time_ratio[phase]:.3f}" for phase in PHASES),
                ]
            )
            print(f"{name}: {rows[-1]}", flush=True)
    print(markdown_table(["seed", "repack", "s for all steps", "tokens/s", "moves", *PHASES], rows))
    (RUNS / "compare_repack" / "summaries.json").write_text(json.dumps(summaries, indent=1))


if __name__ == "__main__":
    main()
