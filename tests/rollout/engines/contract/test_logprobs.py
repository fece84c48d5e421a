"""Every engine's log-probs are the model's, whatever it goes through."""

import copy

import pytest
import torch

from laminar.rollout.engines.engine import Request
from tests.rollout.engines.contract.comparing import LOGPROB_ERROR_MAX, PROMPT, largest_error, tokens_of
from tests.rollout.engines.contract.conftest import TIGHT
from tests.rollout.engines.driving import Response, decode, ragged
from tests.rollout.engines.published import publish


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_1(run, make_engine, model):
    request = Request(1, PROMPT, 30, temperature=0.0)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        return (await decode(engine, [request]))[0]

    response = run(scenario())
    with torch.no_grad():
        logits = model.reference(torch.tensor([[*PROMPT, *response.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert response.token_ids == logits.argmax(-1).tolist()
    assert response.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=LOGPROB_ERROR_MAX)


def test_a_saturated_engine_preempts_and_stays_exact(run, make_engine, model):
    requests = ragged(16, num_new_tokens=60)
    peaks: list[float] = []

    async def scenario():
        engine = await make_engine(model, TIGHT)
        await engine.load(publish(model.reference))
        num_before = engine.stats().num_preemptions
        responses = {request.id: Response() for request in requests}
        engine.submit(requests)
        while any(response.stop_reason is None for response in responses.values()):
            for delta in await engine.next():
                responses[delta.request].take(delta)
            peaks.append(engine.stats().kv_utilization)
        return list(responses.values()), engine.stats(), engine.stats().num_preemptions - num_before

    responses, stats, num_preemptions = run(scenario())
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX
    assert num_preemptions > 0
    assert 0.9 < max(peaks) <= 1.0
    assert (stats.kv_utilization, stats.num_running, stats.num_waiting) == (0.0, 0, 0)


def test_a_preempted_response_equals_one_with_room(run, make_engine, model):
    requests = ragged(12, num_new_tokens=60)

    async def scenario(size):
        engine = await make_engine(model, **size)
        await engine.load(publish(model.reference))
        num_before = engine.stats().num_preemptions
        responses = await decode(engine, requests)
        return tokens_of(responses), engine.stats().num_preemptions - num_before

    tight, num_preemptions = run(scenario({"size": TIGHT}))
    roomy, _ = run(scenario({}))
    assert num_preemptions > 0
    assert tight == roomy


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "qwen3", "llama"])
def test_logprobs_equal_those_of_transformers(run, make_engine, models, name, temperature):
    model, requests = models[name], ragged(12, temperature=temperature)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    responses = run(scenario())
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX
    assert [len(response.token_ids) for response in responses] == [r.num_new_tokens_max for r in requests]
    assert {response.stop_reason for response in responses} == {"length"}


def test_a_broken_number_ends_its_own_request_only(run, make_engine, models):
    """Token 90's embedding is NaN, which the probe does not meet; what it leaves behind must not reach its neighbours.

    The engine is empty afterwards, also inside: the next load must not find a request that nobody waits for.
    """
    model = models["qwen2_untied"]
    broken = copy.deepcopy(model.reference)
    with torch.no_grad():
        broken.model.embed_tokens.weight[90] = torch.nan
    cursed = Request(9, (*range(50), 90, *range(9)), 400)
    healthy = [Request(id_, tuple(range(id_, id_ + num)), 3, seed=id_) for id_, num in enumerate([80, 70, 60, 5, 6])]

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(broken, version=4))
        mixed = await decode(engine, [cursed, *healthy])
        await engine.load(publish(broken, version=5))
        return mixed, await decode(engine, healthy)

    mixed, again = run(scenario())
    assert (mixed[0].stop_reason, mixed[0].token_ids) == ("error", [])
    assert "version 4 gave log-prob nan" in mixed[0].cause
    assert largest_error(model, healthy, mixed[1:]) < LOGPROB_ERROR_MAX
    assert largest_error(model, healthy, again) < LOGPROB_ERROR_MAX
