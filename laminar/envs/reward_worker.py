"""Runs a reward function on one response after the other, in the main thread of a process that may be killed any time.

    RewardPool ──spawns──► python -m laminar.envs.reward_worker FD PARENT_PID FUNCTION
               ◄── Ready ──
               ── RewardCall ──►  compute_score(...)  ── Reward | RewardFailure ──►   (one at a time)

Starts in a tenth of a second: it imports nothing heavy, and nothing of the process that spawned it.
"""

import inspect
import math
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, cast

import msgspec

from laminar.envs import dapo, math_answer
from laminar.envs.user_code import BUILT_IN_ENVIRONMENT, load_named
from laminar.parent_death import die_with

if TYPE_CHECKING:
    from asyncio import Runner

SETTING = "reward.function"
CHARACTERS_KEPT = 2_000
"""Of an error message."""

FailureKind = Literal["timeout", "crash", "exception", "invalid_score", "unsendable"]
ComputeScore = Callable[..., object]


class RewardCall(msgspec.Struct, frozen=True):
    """The arguments of one call, as the data set has them and as the model wrote them."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Reward(msgspec.Struct, frozen=True, tag=True):
    """A finite score. `extras`: the finite numbers that a returned dict had besides, for metrics."""

    score: float
    extras: dict[str, float] = {}


class RewardFailure(msgspec.Struct, frozen=True, tag=True):
    """One response that could not be scored. Never a score of zero: that would be a judgement."""

    kind: FailureKind
    cause: str


class Ready(msgspec.Struct, frozen=True):
    """The function is loaded, or `error` says why it cannot be."""

    error: str = ""


def main(fd: int, parent_pid: int, named: str) -> None:
    die_with(parent_pid, f"reward worker: its pool's process {parent_pid} is gone")
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)  # what user code starts must not keep the channel open after a crash
    try:
        compute_score = load_compute_score(named)
    except BaseException as error:  # noqa: BLE001  (the process's edge; user code may even call sys.exit)
        cause = str(error) if isinstance(error, ValueError) else f"{SETTING}={named}: {_describe(error)}"
        send(channel, Ready(cause))
        return
    send(channel, Ready())
    scorer = _Scorer(compute_score)
    while (call := _receive(channel)) is not None:
        send(channel, scorer.score(call))


def load_compute_score(named: str) -> ComputeScore:
    """A rule that comes with Laminar, by its name, an environment's score(), or the user's function, by `path.py:name`.

    Raises ValueError if it cannot be loaded or takes other arguments than verl's.
    """
    match named:
        case "math_answer":
            return math_answer.compute_score
        case "dapo":
            return dapo.compute_score
        case "math_verify":
            return _load_math_verify()
        case _ if named == BUILT_IN_ENVIRONMENT:
            return _score_of_environment(named)
        case _:
            return _load_users(named)


def _load_math_verify() -> ComputeScore:
    try:
        from laminar.envs.math_verify_answer import compute_score  # imports sympy, so only when chosen
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{SETTING}=math_verify needs the package math-verify ({error}); install it with `pip install "
            "'laminar-rl[math]'`, or take reward.function=math_answer"
        ) from error
    return compute_score


def _load_users(named: str) -> ComputeScore:
    function = load_named(named, SETTING)
    if isinstance(function, type):
        return _score_of_environment(named)
    if not callable(function):
        raise ValueError(f"{SETTING}={named} is a {type(function).__name__}; it must be a function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # written in C without a signature: the first call will tell
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info=None)
    except TypeError as error:
        raise ValueError(
            f"{SETTING}={named} must accept (data_source, solution_str, ground_truth, extra_info=None) by name; "
            f"it has {signature}: {error}"
        ) from error
    return function


def _score_of_environment(named: str) -> ComputeScore:
    from laminar.envs.env import load_environment  # only a run with an environment pays for it

    return load_environment(named).score


class _Scorer:
    def __init__(self, compute_score: ComputeScore) -> None:
        self._compute_score = compute_score
        self._runner: Runner | None = None

    def score(self, call: RewardCall) -> Reward | RewardFailure:
        try:
            value = self._compute_score(
                data_source=call.data_source,
                solution_str=call.solution_str,
                ground_truth=call.ground_truth,
                extra_info=call.extra_info,
            )
            if inspect.isawaitable(value):
                value = self._wait_for(value)
            return reward_of(value)
        except BaseException as error:  # noqa: BLE001  (the process's edge; user code may even call sys.exit)
            return RewardFailure("exception", _describe(error))
        finally:
            # An alarm that the call left behind would kill the next one.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _wait_for(self, value: Awaitable[object]) -> object:
        import asyncio  # a third of the start-up time, and most functions are not async

        async def wait() -> object:
            return await value

        if self._runner is None:
            self._runner = asyncio.Runner()  # one loop for all calls, so that the function may keep its connections
        return self._runner.run(wait())


def reward_of(value: object) -> Reward | RewardFailure:
    """What a reward function returned, judged: a finite number, a bool (1 or 0), or a dict with such a `score`."""
    extras: dict[str, object] = {}
    score = value
    if isinstance(value, dict):
        extras = {str(name): extra for name, extra in cast(dict[object, object], value).items()}
        if "score" not in extras:
            return RewardFailure("invalid_score", f"the dict returned has no 'score', only {', '.join(extras)}")
        score = extras.pop("score")
    number = _as_number(score)
    if number is None:
        return RewardFailure("invalid_score", f"{_shorten(repr(score))} is not a finite number")
    return Reward(number, {name: n for name, extra in extras.items() if (n := _as_number(extra)) is not None})


def send(channel: socket.socket, message: Ready | Reward | RewardFailure) -> None:
    channel.sendall(frame(msgspec.msgpack.encode(message)))


def frame(payload: bytes) -> bytes:
    """A message on the channel: its length in four bytes, then itself."""
    return struct.pack("<I", len(payload)) + payload


def _receive(channel: socket.socket) -> RewardCall | None:
    """The next call; None once the pool has closed the channel."""
    header = _receive_exactly(channel, 4)
    if header is None:
        return None
    payload = _receive_exactly(channel, struct.unpack("<I", header)[0])
    return msgspec.msgpack.decode(payload, type=RewardCall) if payload is not None else None


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        part = channel.recv(num_bytes - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


def _as_number(value: object) -> float | None:
    """None for what is no number, or no finite one."""
    # Takes in numpy's and torch's scalars, and leaves text out.
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None  # an array
    return number if math.isfinite(number) else None


def _describe(error: BaseException) -> str:
    """The exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return _shorten(f"{type(error).__name__}: {error}{where}")


def _shorten(text: str) -> str:
    """Short enough for a report, and free of the half characters that cannot be encoded."""
    text = text if len(text) <= CHARACTERS_KEPT else text[:CHARACTERS_KEPT] + "…"
    return text.encode(errors="replace").decode()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
