"""Poses "apply f(x) = x∘b mod 10, n times", demonstrates how to answer, and scores answers (standard library only).

prompt    f(x)=x-5 mod 10. x=6. Apply f 04 times.
response  04:6-5=1 03:1-5=6 02:6-5=1 01:1-5=6
          Answer: 6
"""

import math
import random
import re
from dataclasses import dataclass
from typing import Any

MODULUS = 10
NUM_TIMES_MAX = 32

_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Problem:
    operator: str
    operand: int
    x: int
    num_times: int

    @property
    def prompt(self) -> str:
        # The count has two digits even below ten: the model then counts down by rote, and long problems generalise.
        return f"f(x)=x{self.operator}{self.operand} mod {MODULUS}. x={self.x}. Apply f {self.num_times:02d} times.\n"

    @property
    def answer(self) -> str:
        value = self.x
        for _ in range(self.num_times):
            value = apply(self.operator, value, self.operand)
        return str(value)


def apply(operator: str, value: int, operand: int) -> int:
    match operator:
        case "+":
            return (value + operand) % MODULUS
        case "-":
            return (value - operand) % MODULUS
        case "*":
            return (value * operand) % MODULUS
        case _:
            raise ValueError(f"operator {operator!r} is none of + - *")


def draw_num_times(rng: random.Random) -> int:
    """Log-normal with median 3, cut to 1..32: most answers are short, a few take ten times as long (p99/p50 near 9)."""
    return max(1, min(NUM_TIMES_MAX, round(3 * math.exp(rng.gauss(0, 1)))))


def make_problem(rng: random.Random, num_times: int | None = None) -> Problem:
    """Draw a problem; `num_times` fixes how often f is applied."""
    num_times = num_times or draw_num_times(rng)
    operator = rng.choice("+-*")
    operand = rng.randrange(2 if operator == "*" else 1, MODULUS)
    return Problem(operator, operand, rng.randrange(MODULUS), num_times)


def demo(problem: Problem, rng: random.Random, error_rate: float = 0.0) -> str:
    """A worked response. With `error_rate`, that share of the results is replaced by a random digit and carried on.

    Each step repeats its operands, so it can be written from the text just before it.
    """
    value, steps = problem.x, []
    for num_left in range(problem.num_times, 0, -1):
        result = apply(problem.operator, value, problem.operand)
        if error_rate and rng.random() < error_rate:
            result = rng.randrange(MODULUS)
        steps.append(f"{num_left:02d}:{value}{problem.operator}{problem.operand}={result}")
        value = result
    return " ".join(steps) + f"\nAnswer: {value}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1 if the response ends in `Answer: ` and the ground truth, else 0 (the signature of verl's reward functions)."""
    del data_source, extra_info
    found = _ANSWER.search(solution_str)
    return 1.0 if found and found.group(1) == str(ground_truth) else 0.0
