"""Draws what `laminar bench relay --json` measured: `python -m scripts.relay_picture FILE.jsonl [...]`.

Writes docs/images/relay_broadcast.svg: each method's time, as a multiple of one copy, against the number of relays.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs/images/relay_broadcast.svg"
COLOURS = {"chain": "#0072b2", "gloo": "#e69f00", "sequential": "#d55e00", "ray": "#cc79a7"}


def main(paths: list[str]) -> None:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    emulated = [row for row in rows if row["link"].startswith("emulated") and row.get("fault") is None]
    draw([row for row in emulated if row["method"] in COLOURS], PICTURE)
    print(PICTURE)


def draw(rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib import pyplot  # only in the development environment

    by_method: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        by_method[str(row["method"])].append((row["num_relays"], row["ratio_to_one_copy"]))
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for method, points in by_method.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", color=COLOURS[method], label=method)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({row["num_relays"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_xlabel("relays")
    axes.set_ylabel("seconds to the last relay, in copies over one link")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1:])
