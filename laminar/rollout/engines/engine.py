"""Defines what an engine is to a rollout worker: batched, token-in and token-out, one weight version at a time."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from laminar.control.messages import DecodeCost
from laminar.relay.manifest import LeasedVersion

StopReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True):
    """One response to decode, or to go on decoding.

    token_ids: the prompt and, when resuming, the response tokens so far. `position` counts the response tokens
    already in it, so that the sampling noise can depend on (seed, position) alone, whatever the replica.
    """

    id: int
    token_ids: tuple[int, ...]
    num_new_tokens_max: int
    position: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    evaluation: bool = False
    may_continue: bool = False
    """Whether, once it has stopped, a request of this id may come that begins with its tokens: the engine may then keep
    its KV, as long as nobody needs the room, until that request, or abort() of the id."""
    kv: memoryview | None = None
    """KV cache of its first tokens, as export_kv() of such an engine gave it under the version loaded here. An engine
    that cannot take it in computes it anew; the bytes may go when the request has ended."""


class ExportedKv(msgspec.Struct, frozen=True):
    """Where in the memory given to export_kv() a request's KV cache lies, and of how many leading tokens it is."""

    num_tokens: int
    offset: int
    num_bytes: int


class Delta(msgspec.Struct, frozen=True):
    """New tokens of one request with their behaviour log-probs (at the request's temperature, in nats; at 1 if greedy).

    Under an evaluation's top_p and top_k, engines differ in whether the log-prob is that of what was left to draw from.
    stop_reason is set on the request's last delta. "error" carries the cause and no tokens.
    """

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason | None = None
    cause: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    """What an engine can do beyond the contract; nobody may rely on more."""

    noise_by_position: bool
    """A response that was interrupted goes on as if nothing had happened, even when it is sampled.

    Without it the noise after an interruption is drawn anew, from the seed and the position where it goes on.
    """


class EngineStats(msgspec.Struct, frozen=True):
    kv_utilization: float
    """Share of the KV blocks that live requests hold, 0 to 1."""
    kv_capacity_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    """Requests put back into the queue for want of KV blocks, since the start."""
    num_steps: int
    version: int | None
    num_kept: int = 0
    """Requests that have stopped and whose KV is kept; `kv_utilization` counts it."""


class Engine(Protocol):
    """Decodes many requests at once on one copy of the weights.

    A request is owned by the engine from submit until its last delta. Weights are only loaded while no request is
    alive; an interrupt is therefore abort, load, submit again from tokens. All calls come from one event loop.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that can never fit or that would train on truncated sampling."""
        ...

    async def abort(self, ids: Sequence[int]) -> list[Delta]:
        """Stop these requests; returns their last deltas (tokens not yet delivered, stop_reason "abort").

        An id that the engine does not hold any more is not in the list: its last delta came from next(). KV that is
        kept for one of them is given up.
        """
        ...

    def export_kv(self, ids: Sequence[int], allocate: Callable[[int], memoryview]) -> dict[int, ExportedKv]:
        """Copy the KV caches of live requests into memory of `allocate(bytes)`, for another engine to go on with.

        Comes before their abort. Requests without a cache, and all of an engine that cannot do this, are left out.
        """
        ...

    async def next(self) -> list[Delta]:
        """Wait for work if there is none, run one engine step, return its deltas (maybe none: a prefill step).

        Cancelled while it waits, it loses nothing. Raises EngineDied once what decodes is gone; the tokens of every
        step before have been returned by then.
        """
        ...

    async def load(self, leased: LeasedVersion) -> None:
        """Take in a version while no request is alive; drops every cached prefix.

        Raises RuntimeError while requests are alive, and WrongWeights if the log-prob probe disagrees with the
        publisher's.
        """
        ...

    def stats(self) -> EngineStats: ...

    def decode_cost(self) -> DecodeCost:
        """What a step costs, modelled or measured; repack takes its batch bound from it."""
        ...

    async def close(self) -> None: ...


class EngineDied(RuntimeError):
    """What decodes is gone, or makes no step any more; the engine can only be closed."""


class WrongWeights(RuntimeError):
    """The weights served are not the weights published."""
