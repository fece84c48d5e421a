"""Drives an engine through its protocol and collects what it delivers."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from laminar.rollout.engines.engine import Delta, Engine, Request

DEADLINE_S = 60.0
Result = TypeVar("Result")


@dataclass
class Response:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str | None = None
    cause: str = ""

    def take(self, delta: Delta) -> None:
        assert self.stop_reason is None, "a delta came after the last one"
        assert len(delta.token_ids) == len(delta.logprobs)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.stop_reason, self.cause = delta.stop_reason, delta.cause


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def finish(engine: Engine, responses: dict[int, Response]) -> None:
    """Take deltas until every response has its last one."""
    while any(response.stop_reason is None for response in responses.values()):
        for delta in await engine.next():
            responses[delta.request].take(delta)


async def decode(engine: Engine, requests: Sequence[Request]) -> list[Response]:
    """Submit all at once; the responses in the requests' order."""
    responses = {request.id: Response() for request in requests}
    engine.submit(requests)
    await finish(engine, responses)
    return list(responses.values())


async def interrupt(engine: Engine, requests: Sequence[Request], num_tokens: int) -> list[Response]:
    """Submit all, abort them once each has so many tokens."""
    responses = {request.id: Response() for request in requests}
    engine.submit(requests)
    while any(len(response.token_ids) < num_tokens for response in responses.values()):
        for delta in await engine.next():
            responses[delta.request].take(delta)
    for delta in await engine.abort(list(responses)):
        responses[delta.request].take(delta)
    return list(responses.values())


def resumed(request: Request, response: Response) -> Request:
    """What goes on where the response stopped."""
    num_tokens = len(response.token_ids)
    return Request(
        id=request.id,
        token_ids=request.token_ids + tuple(response.token_ids),
        num_new_tokens_max=request.num_new_tokens_max - num_tokens,
        position=request.position + num_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
    )


def ragged(num_requests: int, *, temperature: float = 1.0, num_new_tokens: int = 30) -> list[Request]:
    """Requests whose prompts and responses all differ in length."""
    return [
        Request(
            id=index,
            token_ids=tuple((7 * index + 3 * k) % 96 for k in range(5 + 9 * index)),
            num_new_tokens_max=num_new_tokens + 7 * index,
            temperature=temperature,
            seed=100 + index,
        )
        for index in range(num_requests)
    ]
