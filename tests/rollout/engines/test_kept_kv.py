"""KV of a request that has stopped and may go on: kept in no slot, within a share, first to go when room is needed."""

import msgspec
import pytest

from laminar.config import EmbeddedEngineConfig
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from tests.rollout.engines.driving import Response, decode, finish, resumed, run
from tests.rollout.engines.published import publish

ANY_TOKEN = tuple(range(96))
OBSERVED = (11, 12, 13, 14)


def make_engine(model, **settings) -> EmbeddedEngine:
    config = EmbeddedEngineConfig.model_validate({"num_slots": 8, "kv_capacity_tokens": 4096} | settings)
    return EmbeddedEngine(config, model.path, stop_token_ids=())


async def loaded(model, **settings) -> EmbeddedEngine:
    engine = make_engine(model, **settings)
    await engine.load(publish(model.reference))
    return engine


def first_turn(id: int, num_prompt_tokens: int = 100) -> Request:
    """Stops with its first token, and may go on."""
    prompt = tuple((7 * id + 3 * k) % 96 for k in range(num_prompt_tokens))
    return Request(id, prompt, num_new_tokens_max=40, seed=id, stop_token_ids=ANY_TOKEN, may_continue=True)


def second_turn(request: Request, response: Response) -> Request:
    """Goes on after an observation, to the end of the budget."""
    observed = Response([*response.token_ids, *OBSERVED])
    return msgspec.structs.replace(resumed(request, observed), stop_token_ids=())


async def two_turns(engine: EmbeddedEngine, requests: list[Request]) -> list[Response]:
    first = await decode(engine, requests)
    return await decode(engine, [second_turn(r, f) for r, f in zip(requests, first, strict=True)])


def test_a_response_that_goes_on_from_kept_kv_is_what_it_is_without(model):
    async def both():
        requests = [first_turn(id, 40 + 30 * id) for id in range(5)]
        return [await two_turns(await loaded(model, kept_kv_share_max=share), requests) for share in (0.5, 0)]

    kept, computed = run(both())
    for one, other in zip(kept, computed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_what_is_kept_need_not_be_computed_again(model):
    """A prompt of 200 tokens in chunks of 16 takes 13 steps."""

    async def steps_to_first_token(share: float) -> int:
        engine = await loaded(model, kept_kv_share_max=share, prefill_chunk_tokens=16)
        request = first_turn(0, 200)
        (response,) = await decode(engine, [request])
        engine.submit([second_turn(request, response)])
        num_steps = 1
        while not await engine.next():
            num_steps += 1
        return num_steps

    assert run(steps_to_first_token(0.5)) == 1
    assert run(steps_to_first_token(0)) >= 13


def test_one_that_waits_holds_no_slot_but_its_blocks_count(model):
    async def scenario():
        engine = await loaded(model, num_slots=1)
        await decode(engine, [first_turn(0)])
        waiting = engine.stats()
        (other,) = await decode(engine, [msgspec.structs.replace(first_turn(1), may_continue=False)])
        after = engine.stats()
        await engine.abort([0])
        return waiting, other, after, engine.stats()

    waiting, other, after, given_up = run(scenario())
    assert (waiting.num_kept, waiting.num_running) == (1, 0)
    assert waiting.kv_utilization == pytest.approx(7 / 256), "100 prompt tokens in blocks of 16"
    assert other.stop_reason == "stop"
    assert after.num_kept == 1
    assert (given_up.num_kept, given_up.kv_utilization) == (0, 0)


@pytest.mark.parametrize(("share", "num_kept"), [(0.0, 0), (0.25, 2), (1.0, 4)])
def test_only_a_share_is_kept_and_the_oldest_goes_first(model, share, num_kept):
    """Each holds 7 of 64 blocks."""

    async def scenario():
        engine = await loaded(model, kv_capacity_tokens=1024, kept_kv_share_max=share)
        for id in range(4):
            await decode(engine, [first_turn(id)])
        return engine.stats().num_kept, list(engine._batch.kept)

    assert run(scenario()) == (num_kept, list(range(4))[4 - num_kept :])


def test_room_is_taken_from_those_that_wait_before_anybody_is_preempted(model):
    async def scenario():
        engine = await loaded(model, kv_capacity_tokens=512, kept_kv_share_max=1.0)
        requests = [first_turn(id) for id in range(4)]
        waiting = [await decode(engine, [request]) for request in requests]
        before = engine.stats()
        long = Request(9, tuple(range(50)) * 4, num_new_tokens_max=200, seed=9)
        (grown,) = await decode(engine, [long])
        after = engine.stats()
        second = [second_turn(r, w[0]) for r, w in zip(requests, waiting, strict=True)]
        return before, grown, after, await decode(engine, second)

    before, grown, after, gone_on = run(scenario())
    assert (before.num_kept, grown.stop_reason) == (4, "length")
    assert after.num_preemptions == 0
    assert after.num_kept < 4
    assert [response.stop_reason for response in gone_on] == ["length"] * 4


def test_kv_of_other_tokens_is_not_taken(model):
    """A trajectory that started again has the same id."""

    async def scenario():
        engine = await loaded(model)
        await decode(engine, [first_turn(0)])
        restarted = msgspec.structs.replace(first_turn(3), id=0, stop_token_ids=())
        (response,) = await decode(engine, [restarted])
        fresh = await loaded(model)
        (expected,) = await decode(fresh, [restarted])
        return response, expected

    response, expected = run(scenario())
    assert response.token_ids == expected.token_ids


def test_kv_of_old_weights_does_not_outlive_them(model, models):
    async def scenario():
        engine = await loaded(model)
        (response,) = await decode(engine, [first_turn(0)])
        await engine.load(publish(models["qwen2_tied_later"].reference, version=2))
        kept = engine.stats().num_kept
        later = make_engine(model)
        await later.load(publish(models["qwen2_tied_later"].reference, version=2))
        request = second_turn(first_turn(0), response)
        return kept, await decode(engine, [request]), await decode(later, [request])

    kept, one, other = run(scenario())
    assert kept == 0
    assert one[0].token_ids == other[0].token_ids


def test_a_preempted_request_that_had_kept_kv_is_computed_anew(model):
    """It gave its kept KV up when it was admitted; what it lost since then nobody has."""

    async def scenario():
        engine = await loaded(model, kv_capacity_tokens=256, kept_kv_share_max=1.0)
        requests = [first_turn(id, 60) for id in range(2)]
        first = await decode(engine, requests)
        second = [second_turn(r, f) for r, f in zip(requests, first, strict=True)]
        second = [msgspec.structs.replace(s, num_new_tokens_max=100) for s in second]
        responses = {s.id: Response() for s in second}
        engine.submit(second)
        await finish(engine, responses)
        return engine.stats().num_preemptions, responses

    num_preemptions, responses = run(scenario())
    assert num_preemptions >= 1
    assert [response.stop_reason for response in responses.values()] == ["length", "length"]
