"""Translates between Laminar's requests and deltas and vLLM's."""

import math
from collections.abc import Sequence

from vllm.outputs import RequestOutput  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

from laminar.rollout.engines.engine import Delta, Request
from laminar.rollout.engines.sampling import seed_at

TEMPERATURE_MIN = 0.01
"""vLLM raises what lies between 0 and this to this, so its log-probs would be of another temperature."""


def refuse_near_greedy(requests: Sequence[Request]) -> None:
    for request in requests:
        if 0 < request.temperature < TEMPERATURE_MIN:
            raise ValueError(
                f"request {request.id} asks for temperature {request.temperature}; vLLM samples at 0 (greedy) or at "
                f"{TEMPERATURE_MIN} and above"
            )


def sampling_of(request: Request, stop_token_ids: Sequence[int]) -> SamplingParams:
    """stop_token_ids: end every response, besides the request's own."""
    return SamplingParams(
        max_tokens=request.num_new_tokens_max,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=seed_at(request.seed, request.position),
        stop_token_ids=[*{*request.stop_token_ids, *stop_token_ids}],
        # Stop tokens are all stated; which others vLLM would find in the model's folder must not matter.
        ignore_eos=True,
        # Of the token sampled, and of no other.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def scoring() -> SamplingParams:
    """Gives the log-probs of the prompt's own tokens; vLLM must draw one, which nobody wants."""
    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def delta_of(request: Request, output: RequestOutput, version: int | None) -> Delta:
    """What is new of a request. A log-prob that is not finite, or a token of another version, ends it with an error."""
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    logprobs = tuple(completion.logprobs.logprobs) if completion.logprobs is not None else ()
    assert len(logprobs) == len(token_ids), (request.id, len(logprobs), len(token_ids))
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            return _error(request, f"version {version} gave log-prob {logprob} for token {index} of a delta")
    served = {span.version for span in completion.weight_versions or ()}
    if served - {str(version)}:
        return _error(request, f"vLLM says that it served versions {sorted(served)} where version {version} is loaded")
    match completion.finish_reason:
        case None | "stop" | "length" | "abort" as stop_reason:
            return Delta(request=request.id, token_ids=token_ids, logprobs=logprobs, stop_reason=stop_reason)
        case other:
            return _error(request, f"vLLM ended it: {other}")


def _error(request: Request, cause: str) -> Delta:
    return Delta(request=request.id, token_ids=(), logprobs=(), stop_reason="error", cause=cause)
