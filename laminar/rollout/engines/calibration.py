"""Measures what a decode step costs here, in a fraction of a second, on slots of its own."""

import statistics
import time

from laminar.control.messages import DecodeCost
from laminar.rollout.engines.engine import Request
from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.sequence import Sequence
from laminar.rollout.engines.steps import decode
from laminar.rollout.engines.transformer import Transformer

NUM_STEPS = 7
NUM_RUNNING = 16
NUM_TOKENS_SHORT = 16
NUM_TOKENS_LONG = 112


def measure_decode_cost(transformer: Transformer, *, num_slots: int, num_tokens_max: int) -> DecodeCost:
    """Solve DecodeCost's line from three points: batch 1, a larger batch, and that with more KV tokens.

    The time of a step does not depend on what the weights are, so none need to be loaded.
    """
    long = min(NUM_TOKENS_LONG, num_tokens_max - NUM_STEPS - 2)
    short = min(NUM_TOKENS_SHORT, long)
    num_running = min(NUM_RUNNING, num_slots)
    one_s, many_s, many_long_s = (
        _step_s(transformer, num_running=num, num_tokens=tokens)
        for num, tokens in ((1, short), (num_running, short), (num_running, long))
    )
    return solve_decode_cost(
        one_s=one_s, many_s=many_s, many_long_s=many_long_s, num_running=num_running, short=short, long=long
    )


def solve_decode_cost(
    *, one_s: float, many_s: float, many_long_s: float, num_running: int, short: int, long: int
) -> DecodeCost:
    """The line through three step times: of one trajectory, of `num_running`, and of those with longer contexts.

    short, long: KV tokens of each trajectory in the first two, and in the third.
    """
    # Noise may tilt a line the wrong way; a cost is not negative.
    per_kv_token_s = max(0.0, (many_long_s - many_s) / (num_running * (long - short))) if long > short else 0.0
    per_kv_token_s = min(per_kv_token_s, one_s / (2 * short))
    per_trajectory_s = (many_s - one_s) / (num_running - 1) if num_running > 1 else 0.0
    per_running_s = max(0.0, per_trajectory_s - per_kv_token_s * short)
    floor_s = max(0.0, one_s - per_kv_token_s * short - per_running_s)
    return DecodeCost(floor_s=floor_s, per_kv_token_s=per_kv_token_s, per_running_s=per_running_s)


def _step_s(transformer: Transformer, *, num_running: int, num_tokens: int) -> float:
    """Median of a few steps; the first, which touches fresh memory, does not count."""
    slots = KvSlots(transformer.architecture, num_tokens_max=num_tokens + NUM_STEPS + 2)
    for seed in range(num_running):
        request = Request(id=seed, token_ids=(0,) * num_tokens, num_new_tokens_max=NUM_STEPS + 2, seed=seed)
        sequence = Sequence(request)
        slots.place(sequence)
        sequence.num_cached = num_tokens - 1
    durations_s = []
    for _ in range(NUM_STEPS + 1):
        started_s = time.perf_counter()
        for sequence, token, _ in decode(transformer, slots):
            sequence.tokens.append(token)
            slots.grow(sequence)
        durations_s.append(time.perf_counter() - started_s)
    return statistics.median(durations_s[1:])
