"""Defines an environment, which answers the turns of a trajectory, and asks it with a deadline."""

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from laminar.envs.user_code import load_named

SETTING = "rollout.environment"


class Turn(msgspec.Struct, frozen=True):
    """A turn that the model has just ended, as text for people and parsers; what is trained on stays token ids."""

    text: str
    """What it wrote in this turn."""
    response_text: str
    """The whole response so far, observations included."""
    num_turns: int
    """Turns so far, this one included."""
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@runtime_checkable
class Environment(Protocol):
    """Answers turns. One instance serves all trajectories of a rollout worker.

    A trajectory may move to another machine between two turns, and a turn may then be asked about twice, so what is
    observed must follow from the Turn alone: an instance keeps nothing about a trajectory.
    """

    turn_ends: tuple[str, ...]
    """Texts that end a turn besides the end of the sequence, each a single token of the tokenizer: `("</code>",)`."""

    def observe(self, turn: Turn) -> str | Awaitable[str | None] | None:
        """What the model reads next, or None when the trajectory is done. May be `async def`.

        The text is appended exactly as it is, chat markup included, as tokens that carry no loss. A mistake of the
        model's (a malformed call, an unknown tool) is an observation that says so; an exception fails the trajectory.
        """
        ...


class ObservationFailed(RuntimeError):
    """An environment raised, took too long, or answered with something that is no text."""


def load_environment(named: str) -> Environment:
    """An instance of the class that `rollout.environment=path.py:Class` names, made without arguments.

    Raises ValueError naming what the class lacks.
    """
    loaded = load_named(named, SETTING)
    if not isinstance(loaded, type):
        raise ValueError(f"{SETTING}={named} is a {type(loaded).__name__}; it must be a class")
    try:
        environment = cast(object, loaded())
    except Exception as error:
        raise ValueError(f"{SETTING}={named}: {loaded.__name__}() raised {type(error).__name__}: {error}") from error
    if not isinstance(environment, Environment):
        missing = [member for member in ("turn_ends", "observe") if member not in dir(environment)]
        raise ValueError(f"{SETTING}={named} lacks {' and '.join(missing)} (see laminar/envs/env.py)")
    ends = cast(object, environment.turn_ends)
    if not isinstance(ends, tuple) or not all(isinstance(end, str) and end for end in cast(tuple[object, ...], ends)):
        raise ValueError(f"{SETTING}={named}: turn_ends={ends!r} must be a tuple of texts, () for none")
    return environment


async def observe(environment: Environment, turn: Turn, *, timeout_s: float) -> str | None:
    """Ask the environment; its failure, whatever it is, rises as ObservationFailed with the cause in words.

    One that is not `async` runs in a thread. A thread cannot be killed, so one that hangs for ever keeps it.
    """
    name = type(environment).__name__
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            observation = await _call(environment, turn)
    except Exception as error:
        if deadline.expired():
            raise ObservationFailed(f"{name}.observe took more than {timeout_s} s") from error
        raise ObservationFailed(f"{name}.observe raised {type(error).__name__}: {error}") from error
    if observation is not None and not isinstance(cast(object, observation), str):
        raise ObservationFailed(f"{name}.observe returned {type(observation).__name__}; expected text or None")
    if observation == "":
        raise ObservationFailed(f"{name}.observe returned empty text; None says that the trajectory is done")
    return observation


async def _call(environment: Environment, turn: Turn) -> str | None:
    if inspect.iscoroutinefunction(environment.observe):
        return await environment.observe(turn)
    observation = await asyncio.to_thread(environment.observe, turn)
    return await observation if inspect.isawaitable(observation) else observation
