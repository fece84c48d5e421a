"""Refuses requests that an engine can never serve, before any of them is queued."""

from collections.abc import Collection, Sequence

import msgspec

from laminar.rollout.engines.engine import Request


class Limits(msgspec.Struct, frozen=True):
    """What bounds a request on an engine: the KV budget and the model's positions, in tokens, and the vocabulary."""

    vocab_size: int
    kv_capacity_tokens: int
    num_positions_max: int
    num_tokens_max: int
    """Prompt and response together: what the two leave, in whole KV blocks."""


def refuse_impossible(requests: Sequence[Request], alive: Collection[int], limits: Limits) -> None:
    """Raise ValueError, naming the request and the fix, if one is malformed or can never be served."""
    ids = [request.id for request in requests]
    if len(set(ids)) < len(ids) or any(id_ in alive for id_ in ids):
        raise ValueError(f"request ids {ids} repeat, or are alive already; give each request its own")
    for request in requests:
        _refuse_malformed(request)
        _refuse_misfit(request, limits)


def _refuse_malformed(request: Request) -> None:
    name, num_tokens = f"request {request.id}", len(request.token_ids)
    if not 0 <= request.position < num_tokens:
        raise ValueError(
            f"{name} has {num_tokens} tokens, {request.position} of them of the response; it needs a prompt"
        )
    if request.num_new_tokens_max < 1 or request.temperature < 0:
        raise ValueError(
            f"{name} asks for {request.num_new_tokens_max} new tokens at temperature {request.temperature}; "
            "ask for at least 1, at 0 or more"
        )
    if not request.evaluation and (request.top_p < 1 or request.top_k > 0):
        raise ValueError(
            f"{name} would train on truncated sampling (top_p={request.top_p}, top_k={request.top_k}), whose "
            "log-probs are not the policy's; leave them off, or mark the request as evaluation"
        )


def _refuse_misfit(request: Request, limits: Limits) -> None:
    name, num_tokens = f"request {request.id}", len(request.token_ids)
    if min(request.token_ids) < 0 or max(request.token_ids) >= limits.vocab_size:
        raise ValueError(
            f"{name} has token ids outside the model's vocabulary of {limits.vocab_size}; is it its tokenizer?"
        )
    num_needed = num_tokens + request.num_new_tokens_max
    if num_needed > limits.num_tokens_max:
        raise ValueError(
            f"{name} may need {num_tokens} + {request.num_new_tokens_max} = {num_needed} KV tokens, but "
            f"engine.kv_capacity_tokens={limits.kv_capacity_tokens} and the model's max_position_embeddings="
            f"{limits.num_positions_max} allow {limits.num_tokens_max}; "
            "lower data.response_tokens_max or raise engine.kv_capacity_tokens"
        )
