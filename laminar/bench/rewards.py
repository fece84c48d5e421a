"""Measures the reward pool: 1,000 responses on two workers, of which one in a hundred hangs its call for ever."""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from laminar.bench.output import show
from laminar.envs.reward_worker import Reward, RewardCall
from laminar.envs.rewards import RewardPool

NUM_RESPONSES = 1_000
HANGING_EVERY = 100
NUM_WORKERS = 2
TIMEOUT_S = 1.0
HANG = "never mind"

FUNCTION = f"""
import time
from laminar.envs.math_answer import compute_score as rule

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == {HANG!r}:
        time.sleep(1)
    return rule(data_source, solution_str, ground_truth, extra_info)
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench rewards", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    result = asyncio.run(measure())
    show(result, as_json=arguments.json)
    return 0


async def measure(num_responses: int = NUM_RESPONSES) -> dict[str, float | int]:
    """Seconds from the first call to the last outcome; the workers are up before."""
    calls = [
        RewardCall("math_dapo", HANG if i % HANGING_EVERY == 0 else f"So it is.\nAnswer: {i % 2}", "1", {})
        for i in range(num_responses)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(FUNCTION)
        async with RewardPool(f"{file}:compute_score", timeout_s=TIMEOUT_S, num_workers=NUM_WORKERS) as pool:
            began_s = time.perf_counter()
            outcomes = await pool.score(calls)
            duration_s = time.perf_counter() - began_s
            num_timeouts = pool.num_failures["timeout"]
    scores = [outcome.score for outcome in outcomes if isinstance(outcome, Reward)]
    return {
        "num_responses": num_responses,
        "num_workers": NUM_WORKERS,
        "timeout_s": TIMEOUT_S,
        "num_scored": len(scores),
        "num_right": sum(score == 1 for score in scores),
        "num_timeouts": num_timeouts,
        "duration_s": round(duration_s, 2),
        "responses_per_s": round(num_responses / duration_s, 1),
    }
