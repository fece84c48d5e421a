"""Measures what a step of a vLLM engine costs, before it serves: a second on a CPU, less on a GPU."""

import statistics
import time
from itertools import pairwise

from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

from laminar.control.messages import DecodeCost
from laminar.rollout.engines.admission import Limits
from laminar.rollout.engines.calibration import NUM_RUNNING, NUM_STEPS, NUM_TOKENS_SHORT, solve_decode_cost
from laminar.rollout.engines.vllm_process import VllmProcess

NUM_TOKENS_LONG = 1024
KV_SHARE_MAX = 0.5
"""Of the KV budget, for what is measured: requests that wait for room would make steps look cheap."""


async def measure_decode_cost(process: VllmProcess, limits: Limits, *, num_slots: int) -> DecodeCost:
    """Solve DecodeCost's line from three points: batch 1, a larger batch, and that with more KV tokens.

    The time of a step does not depend on what the weights are, so none need to be loaded.
    """
    num_running = min(NUM_RUNNING, num_slots)
    room = int(KV_SHARE_MAX * limits.kv_capacity_tokens / num_running) - NUM_STEPS
    long = max(1, min(NUM_TOKENS_LONG, room, limits.num_tokens_max - NUM_STEPS - 2))
    short = min(NUM_TOKENS_SHORT, long)
    one_s, many_s, many_long_s = [
        await process.call(_step_s(process, num_running=num, num_tokens=tokens), "its steps were measured")
        for num, tokens in ((1, short), (num_running, short), (num_running, long))
    ]
    return solve_decode_cost(
        one_s=one_s, many_s=many_s, many_long_s=many_long_s, num_running=num_running, short=short, long=long
    )


async def _step_s(process: VllmProcess, *, num_running: int, num_tokens: int) -> float:
    """Median time between steps, from the one on that gave every request its first token."""
    sampling = SamplingParams(
        max_tokens=NUM_STEPS + 2,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        seed=0,
    )
    prompt = tokens_input([0] * num_tokens)
    collectors = [
        await process.llm.add_request(f"calibration.{num_running}.{num_tokens}.{index}", prompt, sampling)
        for index in range(num_running)
    ]
    began, unfinished = set[int](), set(range(num_running))
    stepped_at_s: list[float] = []
    while unfinished:
        await process.stepped.wait()
        process.stepped.clear()
        if len(began) == num_running == len(unfinished):
            stepped_at_s.append(time.perf_counter())
        for index in sorted(unfinished):
            output = collectors[index].get_nowait()
            if output is not None:
                began.add(index)
                if output.finished:
                    unfinished.remove(index)
    durations_s = [later - earlier for earlier, later in pairwise(stepped_at_s)]
    return statistics.median(durations_s) if durations_s else 0.0
