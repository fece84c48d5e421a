"""Every engine gives back what it has when it is stopped, and goes on from there, here or elsewhere."""

import asyncio

import pytest

from laminar.rollout.engines.engine import Request
from tests.rollout.engines.contract.comparing import LOGPROB_ERROR_MAX, PROMPT, largest_error, tokens_of
from tests.rollout.engines.contract.conftest import TIGHT
from tests.rollout.engines.driving import Response, decode, finish, interrupt, ragged, resumed
from tests.rollout.engines.published import publish

NUM_TOKENS_BEFORE = 10


@pytest.fixture(params=[False, True], ids=["same engine", "another engine"])
def engine_and_next(request, make_engine, model):
    """Where a response begins, and where it goes on; both serve the same version."""

    async def pair():
        first = await make_engine(model)
        second = await make_engine(model, TIGHT) if request.param else first
        for engine in {first, second}:
            await engine.load(publish(model.reference))
        return first, second

    return pair


def test_abort_and_resume_equal_the_uninterrupted_run(run, engine_and_next):
    requests = ragged(6, temperature=0.0, num_new_tokens=60)

    async def scenario():
        first, second = await engine_and_next()
        whole = await decode(first, requests)
        partial = await interrupt(first, requests, NUM_TOKENS_BEFORE)
        rest = await decode(second, continued(requests, partial))
        return whole, partial, rest

    whole, partial, rest = run(scenario())
    assert {response.stop_reason for response in partial} == {"abort"}
    assert all(NUM_TOKENS_BEFORE <= len(response.token_ids) < 60 for response in partial)
    for complete, head, tail in zip(whole, partial, rest, strict=True):
        assert head.token_ids + tail.token_ids == complete.token_ids
        assert head.logprobs + tail.logprobs == pytest.approx(complete.logprobs, abs=LOGPROB_ERROR_MAX)


def test_a_sampled_response_goes_on_reproducibly(run, model, engine_and_next):
    """Wherever it goes on: the same tokens, of the same model, and not those that it began with once more."""
    requests = [Request(id_, PROMPT, 60, seed=1000 + id_) for id_ in range(6)]

    async def scenario():
        first, second = await engine_and_next()
        whole = await decode(first, requests)
        partial = await interrupt(first, requests, NUM_TOKENS_BEFORE)
        again = continued(requests, partial)
        return first.capabilities, whole, partial, again, await decode(first, again), await decode(second, again)

    capabilities, whole, partial, again, rest, rest_elsewhere = run(scenario())
    assert tokens_of(rest) == tokens_of(rest_elsewhere)
    assert largest_error(model, again, rest_elsewhere) < LOGPROB_ERROR_MAX
    assert len({tuple(response.token_ids[:NUM_TOKENS_BEFORE]) for response in rest}) == len(requests)
    if capabilities.noise_by_position:
        joined = [head.token_ids + tail.token_ids for head, tail in zip(partial, rest, strict=True)]
        assert joined == tokens_of(whole)


def test_noise_does_not_repeat_after_an_interruption(run, make_engine, model):
    """Resumed from no token at all a response is the one it was; from a later one its noise must be another's.

    The prompt is the same in both, so equal noise would give equal tokens.
    """

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        fresh = Request(1, (*PROMPT, 7), 40, seed=5)
        return await decode(engine, [fresh]), await decode(engine, [Request(1, (*PROMPT, 7), 40, seed=5, position=1)])

    (fresh,), (resumed_once,) = run(scenario())
    assert fresh.token_ids != resumed_once.token_ids


def test_abort_returns_only_what_is_alive(run, make_engine, model):
    short, queued = Request(1, PROMPT, 2), Request(2, PROMPT, 50)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        responses = {1: Response()}
        engine.submit([short])
        await finish(engine, responses)
        engine.submit([queued])
        return await engine.abort([1, 2, 99]), engine.stats()

    (delta,), stats = run(scenario())
    assert (delta.request, delta.token_ids, delta.stop_reason) == (2, (), "abort")
    assert (stats.kv_utilization, stats.num_running, stats.num_waiting) == (0.0, 0, 0)


def test_what_comes_back_after_an_abort_gets_its_own_tokens_only(run, make_engine, model):
    """Aborted and submitted again at once, many times: nothing of an earlier life arrives later."""
    request = Request(3, PROMPT, 30, temperature=0.0)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        (whole,) = await decode(engine, [request])
        taken = Response()
        for _ in range(4):
            (part,) = await interrupt(engine, [resumed(request, taken)], 3)
            taken.token_ids += part.token_ids
        (rest,) = await decode(engine, [resumed(request, taken)])
        return whole, taken.token_ids + rest.token_ids

    whole, joined = run(scenario())
    assert joined == whole.token_ids


def test_a_cancelled_next_loses_nothing(run, make_engine, model):
    """A worker may give up waiting; what the engine decodes afterwards is complete."""
    request = Request(1, PROMPT, 20)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.next(), 0.01)
        responses = {1: Response()}
        engine.submit([request])
        while responses[1].stop_reason is None:
            waiting = asyncio.create_task(engine.next())
            await asyncio.sleep(0)
            waiting.cancel()
            for delta in await engine.next():
                responses[1].take(delta)
        return responses[1]

    response = run(scenario())
    assert len(response.token_ids) == 20
    assert largest_error(model, [request], [response]) < LOGPROB_ERROR_MAX


def continued(requests: list[Request], partial: list[Response]) -> list[Request]:
    return [resumed(request, response) for request, response in zip(requests, partial, strict=True)]
