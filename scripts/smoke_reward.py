"""The reward of the smoke test with a pretrained model: verl's signature, DAPO's rule beside it."""

from laminar.envs import dapo


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, object] | None = None
) -> dict[str, float | str]:
    """The share of digits in the response; `acc` and `pred` are those of DAPO's rule.

    A model this small solves none of these problems, so by DAPO's rule all rewards would be equal and nothing would be
    trained. This one differs between almost any two responses.
    """
    correct = dapo.compute_score(data_source, solution_str, ground_truth, extra_info)
    return {**correct, "score": sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))}
