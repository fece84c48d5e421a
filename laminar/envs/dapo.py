"""Scores a mathematical answer by the rule that DAPO trained with, verl's `math_dapo`: `reward.function=dapo`."""

from laminar.envs.math_answer import ANSWER, CHARACTERS_LOOKED_AT, as_text, normalise


def compute_score(
    data_source: str,  # noqa: ARG001  (the signature of every reward function)
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,  # noqa: ARG001
) -> dict[str, float | str]:
    """1 if what follows the last `Answer:` in the last 300 characters is the ground truth after normalisation, else -1.

    A response without one is wrong; a \\boxed{} counts only after `Answer:`. Besides the score: `acc`, 1 or 0, and
    `pred`, the answer as normalised.
    """
    answers: list[str] = ANSWER.findall(solution_str[-CHARACTERS_LOOKED_AT:])
    prediction = normalise(answers[-1]) if answers else "[INVALID]"
    correct = prediction == normalise(as_text(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": prediction}
