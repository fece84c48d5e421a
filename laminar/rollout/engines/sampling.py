"""Draws tokens so that token k of a response depends on (seed, k) and the model alone, not on batch or replica.

A counter-based hash gives each (seed, position) one uniform number, which is looked up in the cumulative distribution
over the vocabulary: a response that was interrupted goes on as if nothing had happened.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laminar.rollout.engines.engine import Request

STRETCH = 64
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


class Noise:
    """The uniform numbers of one response, hashed a stretch at a time: one by one would cost as much each."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._start = 0
        self._stretch: list[float] = []

    def at(self, position: int) -> float:
        """For the response's token at `position`: in [0, 1 - 2^-52]."""
        if not self._start <= position < self._start + len(self._stretch):
            self._start, self._stretch = position, uniforms(self._seed, position, STRETCH).tolist()
        return self._stretch[position - self._start]


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """For positions start .. start + count - 1: two rounds of SplitMix64 (Steele et al. 2014), float64.

    52 bits, so that its product with any sum stays below that sum, and the lookup never runs off the end.
    """
    hashed_seed = _mix(np.array([seed & _MASK_64], dtype=np.uint64))
    positions = np.arange(start, start + count, dtype=np.uint64)
    return (_mix(hashed_seed + positions * np.uint64(_GOLDEN)) >> np.uint64(12)) * 2.0**-52


def seed_at(seed: int, position: int) -> int:
    """A seed for engines that draw from a generator of their own: in [0, 2^63), another one at every position.

    With the response's seed alone, what is drawn after an interruption would repeat what was drawn at its beginning.
    """
    hashed_seed = _mix(np.array([seed & _MASK_64], dtype=np.uint64))
    return int(_mix(hashed_seed + np.array([position * _GOLDEN & _MASK_64], dtype=np.uint64))[0]) >> 1


def sample(logits: Tensor, requests: Sequence[Request], noise: Sequence[float]) -> tuple[list[int], list[float]]:
    """A token for each row of logits [num_requests, vocab], with its log-prob in nats.

    noise: one of `Noise` for each. The log-prob is that of the distribution at the request's temperature, before top_k
    and top_p; at temperature 0, where the likeliest token is taken, it is that at 1. In float64: a float32 sum over a
    large vocabulary would lose the tail's tokens. NaN logits give NaN log-probs.
    """
    temperatures = [request.temperature or 1.0 for request in requests]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits.double().div_(torch.tensor(temperatures, dtype=torch.float64).unsqueeze(1))
    logprobs = logits.log_softmax(1, dtype=torch.float64)
    cumulative = logprobs.exp().cumsum_(1)
    for row, request in enumerate(requests):
        if request.top_k > 0 or request.top_p < 1:
            cumulative[row] = _truncated(logprobs[row], request).cumsum_(0)
    # The sum is 1 but for rounding, or for what was cut off.
    targets = torch.tensor(noise, dtype=torch.float64).unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)
    greedy = [row for row, request in enumerate(requests) if request.temperature == 0]
    if greedy:
        tokens[greedy] = logprobs[greedy].argmax(1, keepdim=True)
    # NaN sorts behind everything.
    tokens.clamp_(max=logits.shape[1] - 1)
    return tokens.flatten().tolist(), logprobs.gather(1, tokens).flatten().tolist()


def _truncated(logprobs: Tensor, request: Request) -> Tensor:
    """Probabilities with the tokens outside top_k, then outside top_p of what that leaves, set to zero: [vocab]."""
    kept = logprobs.exp()
    if 0 < request.top_k < len(kept):
        kept[logprobs < logprobs.topk(request.top_k).values[-1]] = 0.0
    if request.top_p < 1:
        ordered, order = kept.sort(descending=True)
        # The token that crosses the mark stays, so at least one does.
        before = ordered.cumsum(0) - ordered
        kept[order[before >= request.top_p * kept.sum()]] = 0.0
    return kept


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step, on uint64 that wrap around."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
