"""Writes the data set of the quickstart with a tool, in verl's schema: `python -m examples.calculator.dataset OUT`.

OUT/train.parquet has 1024 problems, OUT/heldout.parquet 256; all are different. Rows name their tool as verl's do.
"""

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.calculator.task import Problem, make_problem

SEED = 20260
NUM_TRAIN = 1024
NUM_HELDOUT = 256
TOOL = "code_interpreter"

TOOLS_KWARGS = pa.struct([(TOOL, pa.struct([("create_kwargs", pa.struct([("ground_truth", pa.string())]))]))])
EXTRA_INFO = pa.struct(
    [
        ("split", pa.string()),
        ("index", pa.int64()),
        ("n", pa.int64()),
        ("need_tools_kwargs", pa.bool_()),
        ("tools_kwargs", TOOLS_KWARGS),
    ]
)
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", EXTRA_INFO),
    ]
)


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    problems: dict[Problem, None] = {}
    while len(problems) < NUM_TRAIN + NUM_HELDOUT:
        problems[make_problem(rng)] = None
    drawn = list(problems)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "heldout.parquet", drawn[:NUM_HELDOUT], "heldout")
    write(folder / "train.parquet", drawn[NUM_HELDOUT:], "train")


def write(file: Path, problems: list[Problem], split: str) -> None:
    rows = [row(problem, split, index) for index, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    tools_kwargs = {TOOL: {"create_kwargs": {"ground_truth": problem.answer}}}
    return {
        "data_source": "calculator",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "n": problem.num_times,
            "need_tools_kwargs": True,
            "tools_kwargs": tools_kwargs,
        },
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.calculator.dataset OUT")
    main(Path(sys.argv[1]))
