"""Writes the quickstart's data set in verl's schema: `python -m examples.iterate.dataset OUT`.

OUT/train.parquet has 4096 problems, OUT/heldout.parquet 512 that are all different and none of which is in the former.
There are only 260 problems of each length, and short ones are drawn often, so the training problems repeat.
"""

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.iterate.task import Problem, draw_num_times, make_problem

SEED = 20250
NUM_TRAIN = 4096
NUM_HELDOUT = 512

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("n", pa.int64())])),
    ]
)


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    heldout = draw_new(rng, NUM_HELDOUT, excluded=frozenset(), all_different=True)
    train = draw_new(rng, NUM_TRAIN, excluded=frozenset(heldout), all_different=False)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.parquet", train, "train")
    write(folder / "heldout.parquet", heldout, "heldout")


def draw_new(
    rng: random.Random, num_problems: int, *, excluded: frozenset[Problem], all_different: bool
) -> list[Problem]:
    """Problems outside `excluded`. A refused one is drawn again with the same length, so lengths stay log-normal."""
    problems: list[Problem] = []
    refused = set(excluded)
    while len(problems) < num_problems:
        num_times = draw_num_times(rng)
        problem = make_problem(rng, num_times)
        while problem in refused:
            problem = make_problem(rng, num_times)
        if all_different:
            refused.add(problem)
        problems.append(problem)
    return problems


def write(file: Path, problems: list[Problem], split: str) -> None:
    rows = [row(problem, split, index) for index, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "iterate",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "n": problem.num_times},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.iterate.dataset OUT")
    main(Path(sys.argv[1]))
