"""A KV cache that moves from one embedded engine to another: nothing is computed twice, and nothing changes."""

import msgspec
import pytest

from laminar.config import EmbeddedEngineConfig
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Engine, ExportedKv, Request
from tests.rollout.engines.driving import Response, decode, interrupt, resumed, run
from tests.rollout.engines.published import publish

PROMPT = tuple(k % 90 for k in range(100))
CHUNK_TOKENS = 16


class Memory:
    """What an engine exports into."""

    def __init__(self) -> None:
        self.data = bytearray()

    def allocate(self, num_bytes: int) -> memoryview:
        self.data = bytearray(num_bytes)
        return memoryview(self.data)

    def read(self, part: ExportedKv) -> memoryview:
        return memoryview(self.data)[part.offset : part.offset + part.num_bytes].toreadonly()


def make(model, **settings) -> EmbeddedEngine:
    defaults = {"num_slots": 8, "kv_capacity_tokens": 4096, "prefill_chunk_tokens": CHUNK_TOKENS}
    return EmbeddedEngine(EmbeddedEngineConfig.model_validate(defaults | settings), model.path, stop_token_ids=())


async def move(source: Engine, requests: list[Request], num_tokens: int) -> tuple[list[Response], list[Request]]:
    """Decode so far, then take the caches and the tokens out."""
    responses = {request.id: Response() for request in requests}
    source.submit(requests)
    while any(len(response.token_ids) < num_tokens for response in responses.values()):
        for delta in await source.next():
            responses[delta.request].take(delta)
    memory = Memory()
    exported = source.export_kv([request.id for request in requests], memory.allocate)
    for delta in await source.abort([request.id for request in requests]):
        responses[delta.request].take(delta)
    again = [
        msgspec.structs.replace(resumed(request, responses[request.id]), kv=memory.read(exported[request.id]))
        for request in requests
    ]
    return list(responses.values()), again


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3", "llama_biased"])
def test_a_moved_cache_changes_nothing(models, name):
    """Responses of different lengths, in slots of different lengths; each goes on as if it had not moved."""
    model, source, target = models[name], make(models[name]), make(models[name], num_slots=3, block_tokens=8)
    requests = [Request(id_, PROMPT[: 20 + 30 * id_], 60 + 40 * id_, seed=id_) for id_ in range(3)]

    async def scenario():
        for engine in (source, target):
            await engine.load(publish(model.reference))
        whole = await decode(source, requests)
        partial, again = await move(source, requests, 25)
        return whole, partial, await decode(target, again)

    whole, partial, rest = run(scenario())
    for complete, head, tail in zip(whole, partial, rest, strict=True):
        assert head.token_ids + tail.token_ids == complete.token_ids
        assert head.logprobs + tail.logprobs == pytest.approx(complete.logprobs, abs=1e-6)


def test_with_its_cache_a_response_goes_on_at_once_and_without_it_is_taken_in_anew(model):
    source, target = make(model), make(model)
    request = Request(1, PROMPT, 80, seed=3)

    async def steps_to_first_token(again: Request) -> int:
        target.submit([again])
        num_steps = 1
        while not await target.next():
            num_steps += 1
        await target.abort([again.id])
        return num_steps

    async def scenario():
        for engine in (source, target):
            await engine.load(publish(model.reference))
        _, (again,) = await move(source, [request], 40)
        without = msgspec.structs.replace(again, kv=None)
        return await steps_to_first_token(again), await steps_to_first_token(without), len(again.token_ids)

    with_cache, without_cache, num_tokens = run(scenario())
    assert with_cache == 1
    assert without_cache == -(-(num_tokens - 1) // CHUNK_TOKENS)


def test_a_cache_longer_than_what_goes_on_is_used_as_far_as_it_fits(model):
    """Control counts fewer tokens than the replica had: the rest is sampled again, the same."""
    source, target = make(model), make(model)
    request = Request(1, PROMPT, 60, seed=3)

    async def scenario():
        for engine in (source, target):
            await engine.load(publish(model.reference))
        (whole,) = await decode(source, [request])
        (partial,), (again,) = await move(source, [request], 30)
        partial.token_ids = partial.token_ids[:10]
        shorter = msgspec.structs.replace(resumed(request, partial), kv=again.kv)
        return whole, partial, await decode(target, [shorter])

    whole, partial, (rest,) = run(scenario())
    assert partial.token_ids + rest.token_ids == whole.token_ids


def test_a_moved_cache_that_is_preempted_is_computed_anew(model):
    """With a budget that holds not all who came, some lose what they brought."""
    source, target = make(model), make(model, kv_capacity_tokens=256)
    requests = [Request(id_, PROMPT[:40], 90, seed=id_) for id_ in range(4)]

    async def scenario():
        for engine in (source, target):
            await engine.load(publish(model.reference))
        whole = await decode(source, requests)
        partial, again = await move(source, requests, 20)
        return whole, partial, await decode(target, again)

    whole, partial, rest = run(scenario())
    assert target.stats().num_preemptions > 0
    assert [a.token_ids + b.token_ids for a, b in zip(partial, rest, strict=True)] == [r.token_ids for r in whole]


def test_what_waits_has_no_cache_to_give(model):
    engine = make(model, num_slots=1)

    async def scenario():
        await engine.load(publish(model.reference))
        await interrupt(engine, [Request(0, PROMPT, 5)], 1)
        engine.submit([Request(1, PROMPT, 50), Request(2, PROMPT, 50)])
        await engine.next()
        return set(engine.export_kv([1, 2, 99], Memory().allocate)), engine.export_kv([99], Memory().allocate)

    assert run(scenario()) == ({1}, {})
