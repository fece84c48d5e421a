"""Compares what an engine delivered with the Hugging Face model."""

import torch

from laminar.rollout.engines.engine import Request
from tests.rollout.engines.driving import Response
from tests.rollout.engines.published import reference_logprobs

LOGPROB_ERROR_MAX = 1e-4
"""What a float32 engine may differ by."""
PROMPT = tuple(range(5, 25))


def largest_error(model, requests: list[Request], responses: list[Response]) -> float:
    """Of the log-probs, over all tokens."""
    return max(
        (reference_logprobs(model.reference, r.token_ids, tuple(a.token_ids), r.temperature) - torch.tensor(a.logprobs))
        .abs()
        .max()
        .item()
        for r, a in zip(requests, responses, strict=True)
    )


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]
