"""Defines an environment: first messages, then observations until it is done, then a score. Asks it with a deadline.

    row ─► first_messages ─► prompt ─► [the model's turn] ─► observe ──text──► [the model's turn] ─► …
                                                               └── None: done ─► score

A newcomer's environment is a class with one method, `observe`; everything else has a default.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, cast

import msgspec

from laminar.config import RolloutConfig
from laminar.data.chat import Chat, Opening, PromptText
from laminar.data.records import Problem
from laminar.envs import math_answer
from laminar.envs.sandbox.sandbox import Sandbox
from laminar.envs.user_code import BUILT_IN_ENVIRONMENT, load_named

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
    earlier_turns: tuple[str, ...] = ()
    """What it wrote in the turns before this one, without what it read in between."""


class Observation(msgspec.Struct, frozen=True):
    """What the model reads next, in pieces: markup, output, markup, output, …, markup.

    Markup is kept whole. Where there is too little room outputs are cut in their middle, so that whatever closes the
    message, and opens the model's next one, still follows. Outputs should be free of the tokenizer's special texts
    (`Chat.neutral`), or a tool could write markup.
    """

    pieces: tuple[str, ...]

    @staticmethod
    def of(text: str) -> "Observation":
        """All of it may be cut."""
        return Observation(("", text, ""))

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Services(msgspec.Struct, frozen=True):
    """What an environment may use."""

    rollout: RolloutConfig
    chat: Chat
    """How the model's messages, tools and tool outputs are written."""
    sandbox: Sandbox
    """Runs code that the model wrote; there is one where the environment says `uses_sandbox`."""


class Environment(Protocol):
    """Subclass this; `observe` is all that must be written. One instance serves all trajectories of a rollout worker.

    A trajectory may go on on another machine between two turns, so an instance keeps nothing about one: what is
    observed must follow from the Turn.
    """

    turn_ends: Sequence[str] = ()
    """Texts that end a turn besides the end of the sequence, each a single token of the tokenizer: `("</code>",)`.
    Read after `start`."""
    repeatable: bool = True
    """Whether `observe` may be called twice for one turn, when its replica was lost or its trajectory moved in
    mid-call. If not, such a trajectory is not moved, and one whose replica is lost in mid-call fails by name."""
    uses_sandbox: bool = False
    """Whether a sandbox is to be started, and tried, before anything else."""

    def start(self, services: Services) -> None:
        """Called once before everything else: in each rollout worker, and where the data set is read."""

    def first_messages(self, problem: Problem) -> PromptText | Opening:
        """The prompt of a row: chat messages or text, and with an Opening also the tools for the chat template.

        Raises ValueError for a row that does not fit; the message gets its place.
        """
        return problem.prompt

    def observe(self, turn: Turn) -> "str | Observation | Awaitable[str | Observation | None] | None":
        """What the model reads next, or None when the trajectory is done. May be `async def`.

        Text is appended exactly as it is, chat markup included, as tokens that carry no loss. A mistake of the
        model's (a malformed call, an unknown tool) is an observation that says so; an exception fails the trajectory.
        """
        ...

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> Any:
        """The reward of a finished response, unless `reward.function` names a function; its contract is the same."""
        return math_answer.compute_score(data_source, solution_str, ground_truth, extra_info)


class ObservationFailed(RuntimeError):
    """An environment raised, took too long, or answered with something that is no text."""


def load_environment(named: str) -> Environment:
    """An instance of the class that `rollout.environment=path.py:Class` (or a built-in's name) names.

    It is made without arguments, and not started. Raises ValueError naming what is wrong with it.
    """
    if named == BUILT_IN_ENVIRONMENT:
        from laminar.envs.math_with_code import MathWithCode  # it is an environment, so it imports this file

        return MathWithCode()
    loaded = load_named(named, SETTING)
    if not isinstance(loaded, type):
        raise ValueError(f"{SETTING}={named} is a {type(loaded).__name__}; it must be a class")
    if Environment not in loaded.__mro__:
        raise ValueError(
            f"{SETTING}={named} is no environment; write `class {loaded.__name__}(Environment)`, with "
            "`from laminar.envs.env import Environment`"
        )
    if loaded.observe is Environment.observe:
        raise ValueError(f"{SETTING}={named} lacks observe (see laminar/envs/env.py)")
    try:
        environment = cast(Environment, loaded())
    except Exception as error:
        raise ValueError(f"{SETTING}={named}: {loaded.__name__}() raised {type(error).__name__}: {error}") from error
    check_turn_ends(environment, named)
    return environment


def check_turn_ends(environment: Environment, named: str) -> None:
    """A text alone would be taken for a sequence of letters."""
    ends = cast(object, environment.turn_ends)
    if isinstance(ends, str) or not all(isinstance(end, str) and end for end in cast(Sequence[object], ends)):
        raise ValueError(f"{SETTING}={named}: turn_ends={ends!r} must be a tuple of texts, () for none")


async def observe(environment: Environment, turn: Turn, *, timeout_s: float) -> Observation | None:
    """Ask the environment; its failure, whatever it is, rises as ObservationFailed with the cause in words.

    One that is not `async` runs in a thread of its own. A thread cannot be killed: one that hangs for ever stays, and
    is in nobody's way.
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
    if isinstance(observation, str):
        observation = Observation.of(observation)
    elif observation is not None and not isinstance(cast(object, observation), Observation):
        raise ObservationFailed(f"{name}.observe returned {type(observation).__name__}; expected text or None")
    if observation is not None and observation.text == "":
        raise ObservationFailed(f"{name}.observe returned empty text; None says that the trajectory is done")
    return observation


async def _call(environment: Environment, turn: Turn) -> str | Observation | None:
    if inspect.iscoroutinefunction(environment.observe):
        return await environment.observe(turn)
    observation = await _in_a_thread(environment, turn)
    return await observation if inspect.isawaitable(observation) else observation


async def _in_a_thread(environment: Environment, turn: Turn) -> Any:
    """Not one of a pool's: as many turns wait as there are trajectories, and a hung one must not use a place up."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def ask() -> None:
        value, failure = None, None
        try:
            value = environment.observe(turn)
        except BaseException as error:  # noqa: BLE001  (the thread's edge; user code may even call sys.exit)
            # A future cannot carry this one: it would end an iteration somewhere.
            failure = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            return  # the worker has gone

    threading.Thread(target=ask, name=f"{type(environment).__name__}.observe", daemon=True).start()
    return await answer
