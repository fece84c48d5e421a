"""Scores a mathematical answer by its value, with the package math-verify (the `math` extra)."""

# The extra is not everywhere where types are checked.
# pyright: reportMissingImports=false

import logging
from functools import cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

NO_LIMIT: Any = None
"""It takes None for none, which its annotations do not say."""

# It warns that without its own time limits (an alarm, which works in a main thread only) somebody must set one: the
# reward pool does, and kills what does not keep to it.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compute_score(
    data_source: str,  # noqa: ARG001  (the signature of every reward function)
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,  # noqa: ARG001
) -> dict[str, float]:
    """1 if some expression that the response states as its answer equals the ground truth in value, else 0.

    Fractions, decimals, roots, sets, intervals, matrices, equations: what LaTeX writes and sympy understands. Raises
    ValueError for a ground truth that math-verify cannot read: a mistake of the data's, not of the response.
    """
    truth = _parse_truth(str(ground_truth))
    if not truth:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}; use reward.function=math_answer")
    answer = parse(solution_str, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=NO_LIMIT)
    correct = float(verify(truth, answer, timeout_seconds=None))
    return {"score": correct, "acc": correct}


@cache
def _parse_truth(ground_truth: str) -> list[Any]:
    """Each member of a group asks for the same one."""
    return parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=NO_LIMIT)
