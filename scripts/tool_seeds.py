"""Runs the quickstart with a tool with five seeds and prints the table of docs/results.md."""

import argparse

from scripts.quickstart_runs import markdown_table, run_quickstart

HEADER = ["seed", "held-out first", "last", "training s", "tokens/s", "tool used first", "last", "calls first", "last"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5)))
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that differ from the file")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for seed in arguments.seeds:
        summary = run_quickstart(
            f"tool_seeds/{seed}", f"seed={seed}", *arguments.overrides, config="configs/quickstart_tools.yaml"
        )
        tools = summary["tool_use"]
        rows.append(
            [
                str(seed),
                f"{summary['heldout_accuracy_first']:.3f}",
                f"{summary['heldout_accuracy_last']:.3f}",
                f"{summary['train_s']:.0f}",
                f"{summary['tokens_per_s']:,.0f}",
                f"{tools['used_ratio_first']:.2f}",
                f"{tools['used_ratio_last']:.2f}",
                f"{tools['calls_per_trajectory_first']:.2f}",
                f"{tools['calls_per_trajectory_last']:.2f}",
            ]
        )
        print(f"seed {seed}: {rows[-1]}", flush=True)
    print(markdown_table(HEADER, rows))


if __name__ == "__main__":
    main()
