import importlib.util
import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.iterate import dataset
from examples.iterate.task import Problem, compute_score, demo, draw_num_times, make_problem

FOLDER = Path(__file__).parents[2] / "examples" / "iterate"


def rows(split: str) -> list[dict]:
    return pq.read_table(FOLDER / "data" / f"{split}.parquet").to_pylist()


# ------------------------------------------------------------------------------------------------------------- the task


def test_prompt_and_demo_are_as_documented():
    problem = Problem(operator="-", operand=5, x=6, num_times=4)
    assert problem.prompt == "f(x)=x-5 mod 10. x=6. Apply f 04 times.\n"
    assert demo(problem, random.Random(0)) == "04:6-5=1 03:1-5=6 02:6-5=1 01:1-5=6\nAnswer: 6"
    assert problem.answer == "6"


@pytest.mark.parametrize("seed", range(50))
def test_a_right_demo_scores_1_and_a_wrong_one_0(seed):
    rng = random.Random(seed)
    problem = make_problem(rng)
    assert compute_score("iterate", demo(problem, rng), problem.answer, {}) == 1.0
    assert compute_score("iterate", f"Answer: {(int(problem.answer) + 1) % 10}", problem.answer, {}) == 0.0


@pytest.mark.parametrize("text", ["", "6", "Answer: 6 or 7", "Answer: 66", "answer: 6", "Answer: 6\nAnswer: 5"])
def test_only_a_last_line_with_the_answer_scores(text):
    assert compute_score("iterate", text, "6") == 0.0


def test_errors_in_a_demo_are_carried_on():
    problem = Problem(operator="+", operand=1, x=0, num_times=30)
    steps = re.findall(r"\d\d:(\d)\+1=(\d)", demo(problem, random.Random(1), error_rate=0.5))
    assert any((int(x) + 1) % 10 != int(y) for x, y in steps)
    assert all(y == x for (_, y), (x, _) in pairwise(steps))


def test_lengths_have_a_long_tail():
    rng = random.Random(0)
    times = sorted(draw_num_times(rng) for _ in range(10_000))
    assert times[5_000] == 3
    assert 20 <= times[9_900] <= 32


def test_the_reward_loads_alone_and_fast():
    """As the reward process loads it: by path, without the package, without a heavy import."""
    specification = importlib.util.spec_from_file_location("user_reward", FOLDER / "task.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.compute_score("iterate", "Answer: 3", "3", None) == 1.0
    code = "import sys, examples.iterate.task; print({'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, check=True).stdout == b"set()\n"


# --------------------------------------------------------------------------------------------------------- the data set


def test_committed_files_are_what_the_script_writes(tmp_path):
    dataset.main(tmp_path)
    for split, num_rows in (("train", 4096), ("heldout", 512)):
        written = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert written == rows(split)
        assert len(written) == num_rows


def test_heldout_problems_are_all_different_and_none_is_trained_on():
    heldout = [row["prompt"][0]["content"] for row in rows("heldout")]
    assert len(set(heldout)) == 512
    assert not set(heldout) & {row["prompt"][0]["content"] for row in rows("train")}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_rows_have_verls_schema_and_right_answers(split):
    for index, row in enumerate(rows(split)):
        operator, operand, x, num_times = re.fullmatch(
            r"f\(x\)=x(.)(\d) mod 10\. x=(\d)\. Apply f (\d\d) times\.\n", row["prompt"][0]["content"]
        ).groups()
        problem = Problem(operator, int(operand), int(x), int(num_times))
        assert row == {
            "data_source": "iterate",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "n": int(num_times)},
        }


def test_both_splits_have_the_same_lengths():
    train, heldout = (Counter(row["extra_info"]["n"] for row in rows(split)) for split in ("train", "heldout"))
    for num_times in range(1, 8):
        assert train[num_times] / 4096 == pytest.approx(heldout[num_times] / 512, abs=0.06)


# ------------------------------------------------------------------------------------------------------- the warm start


def test_the_committed_model_is_small_and_stops_where_it_should():
    assert (FOLDER / "warm" / "model.safetensors").stat().st_size < 300_000
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "warm")
    generation = json.loads((FOLDER / "warm" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template is None
    assert json.loads((FOLDER / "warm" / "tokenizer.json").read_text())["padding"] is None
    texts = [rows("heldout")[0]["prompt"][0]["content"], "Ünïcode ∫ x² dx → 12345\n\ttab", "if (a) { b(); }"]
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in texts)


def test_the_committed_model_has_the_skill_but_samples_noisily():
    """Right when greedy, less than half of the time when sampled: what RL is to sharpen."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "warm")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "warm", dtype=torch.float32)
    some = [row for row in rows("heldout") if row["extra_info"]["n"] <= 4][:128]
    prompts = torch.tensor([tokenizer(row["prompt"][0]["content"])["input_ids"] for row in some])
    accuracies = {}
    for sampled in (False, True):
        torch.manual_seed(0)
        sequences = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=sampled,
            top_k=0 if sampled else None,
            max_new_tokens=64,
        )
        texts = tokenizer.batch_decode(sequences[:, prompts.shape[1] :], skip_special_tokens=True)
        scores = [compute_score("", t, row["reward_model"]["ground_truth"]) for t, row in zip(texts, some, strict=True)]
        accuracies[sampled] = sum(scores) / len(scores)
    assert accuracies[False] >= 0.98
    assert 0.35 <= accuracies[True] <= 0.75
