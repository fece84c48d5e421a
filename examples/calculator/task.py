"""Poses "apply f(x) = x + b mod 1000, n times", demonstrates how to answer with a tool, and scores answers.

prompt    f(x)=x+351 mod 1000. x=829. Apply f 2 times.
response  2:<code>(829+351)%1000</code><output>180</output>1:180+351=531
          Answer: 531

Each step may call the tool, or be done in the head, which goes wrong half of the time in the demonstrations. What
stands between the output tags the environment writes.
"""

import math
import random
import re
from dataclasses import dataclass
from typing import Any

MODULUS = 1000
NUM_TIMES_MAX = 8
TOOL_RATE = 0.5
"""Share of a demonstration's steps that call the tool."""
ERROR_RATE = 0.5
"""Share of the others whose result is wrong."""

_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Problem:
    operand: int
    x: int
    num_times: int

    @property
    def prompt(self) -> str:
        return f"f(x)=x+{self.operand} mod {MODULUS}. x={self.x}. Apply f {self.num_times} times.\n"

    @property
    def answer(self) -> str:
        return str((self.x + self.num_times * self.operand) % MODULUS)


def draw_num_times(rng: random.Random) -> int:
    """Log-normal with median 2, cut to 1..8: as many calls as a trajectory may make."""
    return max(1, min(NUM_TIMES_MAX, round(2 * math.exp(rng.gauss(0, 0.8)))))


def make_problem(rng: random.Random) -> Problem:
    return Problem(rng.randrange(100, MODULUS), rng.randrange(100, MODULUS), draw_num_times(rng))


def expression(value: int, operand: int) -> str:
    """What the tool is asked."""
    return f"({value}+{operand})%{MODULUS}"


def demo(problem: Problem, rng: random.Random) -> str:
    """A worked response, outputs of the tool included; what goes wrong in the head is carried on."""
    value, steps = problem.x, list[str]()
    for num_left in range(problem.num_times, 0, -1):
        result = (value + problem.operand) % MODULUS
        if rng.random() < TOOL_RATE:
            steps.append(f"{num_left}:<code>{expression(value, problem.operand)}</code><output>{result}</output>")
        else:
            if rng.random() < ERROR_RATE:
                result = rng.randrange(MODULUS)
            steps.append(f"{num_left}:{value}+{problem.operand}={result} ")
        value = result
    return "".join(steps) + f"\nAnswer: {value}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1 if the response ends in `Answer: ` and the ground truth, else 0 (the signature of verl's reward functions)."""
    del data_source, extra_info
    found = _ANSWER.search(solution_str)
    return 1.0 if found and found.group(1) == str(ground_truth) else 0.0
