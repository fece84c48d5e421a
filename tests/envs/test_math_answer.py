import pytest

from laminar.envs.math_answer import compute_score


def score(solution, truth):
    return compute_score("math_dapo", solution, truth)["score"]


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("so\nAnswer: 34", "34"),
        ("Answer: 34", 34),
        ("Answer: 34", 34.0),
        ("answer :  -7 ", "-7"),
        ("Answer: $34$", "34"),
        ("Answer: \\boxed{34}", "34"),
        ("Answer: x = 34", "34"),
        ("Answer: 1,000,000", "1000000"),
        ("Answer: 12 dollars", "12"),
        ("Answer: 90^\\circ", "90"),
        ("Answer: \\text{Monday}", "Monday"),
        ("Answer: \\frac12", "\\frac{1}{2}"),
        ("Answer: \\sqrt3", "\\sqrt{3}"),
        ("Answer: 3 \nAnswer: 34\nbye", "34"),
        ("thus \\boxed{34}.", "34"),
        ("thus \\boxed{3} or rather \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ],
)
def test_the_same_answer_spelt_otherwise_scores_1(solution, truth):
    assert score(solution, truth) == 1.0


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("Answer: 35", "34"),
        ("34", "34"),
        ("", ""),
        ("Answer: 34\nAnswer: 35", "34"),
        ("Answer: 35\n\\boxed{34}", "34"),
        ("\\boxed{34", "34"),
        ("Answer: 34" + " " * 300 + "end", "34"),
        ("Answer:\n34", "35"),
    ],
)
def test_another_answer_or_none_scores_0_and_never_minus_1(solution, truth):
    assert score(solution, truth) == 0.0


def test_only_the_last_300_characters_are_looked_at():
    assert score("Answer: 34\n" + "x" * 289, "34") == 1.0
    assert score("Answer: 34\n" + "x" * 296, "34") == 0.0


def test_the_answer_read_is_returned_beside_the_score():
    assert compute_score("d", "Answer: $1,000$", "1000") == {"score": 1.0, "acc": 1.0, "pred": "1000"}
    assert compute_score("d", "no idea", "1000") == {"score": 0.0, "acc": 0.0, "pred": "[none]"}
