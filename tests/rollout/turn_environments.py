"""Environments for the worker's tests: the model's first line is a turn, and some environments take their time."""

import time
from pathlib import Path

from laminar.envs.env import Environment, Turn
from laminar.envs.math_with_code import MathWithCode

GATE_DEADLINE_S = 60.0


class FirstLine(Environment):
    """Answers the first line with a number; the rest of the response is the second turn."""

    turn_ends = ("\n",)

    def observe(self, turn: Turn) -> str | None:
        return f"<output>{turn.extra_info['tool_output']}</output>" if turn.num_turns == 1 else None


class Gated(FirstLine):
    """Answers only once the file that `extra_info["gate"]` names is there."""

    def observe(self, turn: Turn) -> str | None:
        until = time.monotonic() + GATE_DEADLINE_S
        while not Path(turn.extra_info["gate"]).exists():
            assert time.monotonic() < until, "nobody opened the gate"
            time.sleep(0.002)
        return super().observe(turn)


class Blank(FirstLine):
    """Answers with text that a tokenizer may strip to nothing."""

    def observe(self, turn: Turn) -> str | None:
        return " "


class Raises(FirstLine):
    def observe(self, turn: Turn) -> str | None:
        raise ZeroDivisionError("the tool is broken")


class HalfCharacter(FirstLine):
    def observe(self, turn: Turn) -> str | None:
        return "7\ud800"


class OnceOnly(MathWithCode):
    """Its calls change something elsewhere."""

    repeatable = False
