"""Runs the quickstart with ten seeds and prints the table of docs/results.md."""

import argparse
import json

from scripts.quickstart_runs import RUNS, markdown_table, run_quickstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(10)))
    parser.add_argument("--kill-replica-at-step", type=int, help="kill -9 one replica of every run after this step")
    arguments = parser.parse_args()
    folder = "seeds" if arguments.kill_replica_at_step is None else "killed"
    rows: list[list[str]] = []
    summaries = []
    for seed in arguments.seeds:
        summary = run_quickstart(
            f"{folder}/{seed}", f"seed={seed}", kill_replica_at_step=arguments.kill_replica_at_step
        )
        summaries.append(summary)
        rows.append(
            [
                str(seed),
                f"{summary['heldout_accuracy_first']:.3f}",
                f"{summary['heldout_accuracy_last']:.3f}",
                f"{summary['train_s']:.0f}",
                f"{summary['tokens_per_s']:,.0f}",
                str(summary["num_refreshes"]),
                str(summary["num_repack_moves"]),
                f"{summary['idle_ratio']['replicas']:.2f} / {summary['idle_ratio']['trainer']:.2f}",
                ", ".join(f"{k}: {v}" for k, v in summary["staleness_at_finish"].items()),
                f"{summary['peak_pss_bytes'] / 2**30:.2f}",
            ]
        )
        print(f"seed {seed}: {rows[-1]}", flush=True)
    header = ["seed", "held-out first", "last", "training s", "tokens/s", "refreshes", "repack moves"]
    print(markdown_table([*header, "idle replicas / trainer", "staleness at finish", "peak PSS GiB"], rows))
    (RUNS / folder / "summaries.json").write_text(json.dumps(summaries, indent=1))


if __name__ == "__main__":
    main()
