"""The rules that come with Laminar beside math_answer: DAPO's, and math-verify's."""

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from laminar.envs import dapo
from laminar.envs.reward_worker import Reward, RewardCall, RewardFailure, load_compute_score
from laminar.envs.rewards import RewardPool

DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("solution", "truth", "correct"),
    [
        ("so\nAnswer: 34", "34", True),
        ("Answer: $\\boxed{34}$", 34.0, True),
        ("answer :  -7 ", "-7", True),
        ("Answer: 3 \nAnswer: 1,000", "1000", True),
        ("Answer: 35", "34", False),
        ("thus \\boxed{34}", "34", False),
        ("", "34", False),
        ("Answer: 34" + "x\n" * 160, "34", False),
    ],
)
def test_dapo_s_rule_gives_1_or_minus_1_and_reads_what_follows_answer_only(solution, truth, correct):
    result = dapo.compute_score("math_dapo", solution, truth)
    assert result["score"] == (1.0 if correct else -1.0)
    assert result["acc"] == (1.0 if correct else 0.0)


def test_every_ground_truth_of_dapo_is_its_own_answer():
    file = DATA / "dapo_math_17k" / "dapo_math_17k.parquet"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    truths = [row["ground_truth"] for row in pq.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()]
    assert len(truths) > 17_000
    assert {dapo.compute_score("math_dapo", f"Thus.\nAnswer: {truth}", truth)["score"] for truth in truths} == {1.0}


def test_the_final_answers_of_gsm8k_are_found():
    file = DATA / "gsm8k" / "test.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    for line in file.read_text().splitlines():
        rationale, _, truth = json.loads(line)["answer"].partition("#### ")
        assert dapo.compute_score("openai/gsm8k", f"{rationale}Answer: {truth}", truth.replace(",", ""))["score"] == 1.0


@pytest.fixture
def math_verify():
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    return load_compute_score("math_verify")


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("thus $x = 2\\sqrt{2}$", "\\sqrt{8}", 1.0),
        ("Answer: 34", 34, 1.0),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("\\boxed{(1, 2]}", "(1,2]", 1.0),
        ("\\boxed{35}", "34", 0.0),
        ("no idea", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_math_verify_compares_values(math_verify, solution, truth, score):
    assert math_verify(data_source="m", solution_str=solution, ground_truth=truth, extra_info={}) == {
        "score": score,
        "acc": score,
    }


def test_a_ground_truth_that_math_verify_cannot_read_is_a_failure_and_no_zero(math_verify):
    async def score():
        async with RewardPool("math_verify", timeout_s=60, num_workers=1) as pool:
            return await pool.score([RewardCall("m", "\\boxed{3}", "", {}), RewardCall("m", "\\boxed{3}", "3", {})])

    failed, right = asyncio.run(score())
    assert isinstance(failed, RewardFailure) and failed.kind == "exception"
    assert "cannot read the ground truth ''" in failed.cause
    assert isinstance(right, Reward) and right.score == 1.0 and right.extras == {"acc": 1.0}


def test_without_the_extra_one_message_says_how_to_get_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "laminar.envs.math_verify_answer", raising=False)
    with pytest.raises(ValueError, match=r"reward.function=math_verify needs .*pip install 'laminar-rl\[math\]'"):
        load_compute_score("math_verify")
