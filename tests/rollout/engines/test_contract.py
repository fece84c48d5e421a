"""Holds every engine to the protocol of engine.py: the same tests, whatever decodes."""

import asyncio

import pytest
import torch

from laminar.rollout.engines.engine import Request, WrongWeights
from tests.rollout.engines.driving import Response, decode, finish, interrupt, ragged, resumed, run
from tests.rollout.engines.published import publish, reference_logprobs

LOGPROB_ERROR_MAX = 1e-5
PROMPT = tuple(range(5, 25))


def largest_error(model, requests: list[Request], responses: list[Response]) -> float:
    """Against the Hugging Face model, over all tokens."""
    return max(
        (reference_logprobs(model.reference, r.token_ids, tuple(a.token_ids), r.temperature) - torch.tensor(a.logprobs))
        .abs()
        .max()
        .item()
        for r, a in zip(requests, responses, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "qwen3", "llama"])
def test_logprobs_equal_those_of_transformers(make_engine, models, name, temperature):
    model, engine = models[name], make_engine(models[name])
    requests = ragged(12, temperature=temperature)

    async def scenario():
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    responses = run(scenario())
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX
    assert [len(response.token_ids) for response in responses] == [r.num_new_tokens_max for r in requests]
    assert {response.stop_reason for response in responses} == {"length"}


def test_saturated_engine_preempts_and_stays_exact(make_engine, model):
    engine = make_engine(model, num_slots=8, kv_capacity_tokens=512)
    requests = ragged(16, num_new_tokens=60)
    peaks: list[float] = []

    async def scenario():
        await engine.load(publish(model.reference))
        responses = {request.id: Response() for request in requests}
        engine.submit(requests)
        while any(response.stop_reason is None for response in responses.values()):
            for delta in await engine.next():
                responses[delta.request].take(delta)
            peaks.append(engine.stats().kv_utilization)
        return list(responses.values())

    responses = run(scenario())
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX
    assert engine.stats().num_preemptions > 0
    assert 0.9 < max(peaks) <= 1.0
    stats = engine.stats()
    assert (stats.kv_utilization, stats.num_running, stats.num_waiting) == (0.0, 0, 0)


def test_a_preempted_response_equals_one_with_room(make_engine, model):
    requests = ragged(12, num_new_tokens=60)

    async def scenario(engine):
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    tight = make_engine(model, num_slots=8, kv_capacity_tokens=320)
    assert tokens_of(run(scenario(tight))) == tokens_of(run(scenario(make_engine(model))))
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same engine", "another engine"])
def test_abort_and_resume_equal_the_uninterrupted_run(make_engine, model, elsewhere, temperature):
    first, second = make_engine(model), make_engine(model, num_slots=3, block_tokens=8)
    requests = ragged(6, temperature=temperature)

    async def scenario():
        await first.load(publish(model.reference))
        await second.load(publish(model.reference))
        whole = await decode(first, requests)
        partial = await interrupt(first, requests, num_steps=20)
        assert {response.stop_reason for response in partial} == {"abort"}
        assert all(0 < len(response.token_ids) < 30 for response in partial)
        rest = await decode(
            second if elsewhere else first,
            [resumed(request, response) for request, response in zip(requests, partial, strict=True)],
        )
        return whole, partial, rest

    whole, partial, rest = run(scenario())
    for complete, head, tail in zip(whole, partial, rest, strict=True):
        assert head.token_ids + tail.token_ids == complete.token_ids
        assert head.logprobs + tail.logprobs == pytest.approx(complete.logprobs, abs=LOGPROB_ERROR_MAX)


def test_abort_returns_only_what_is_alive(make_engine, model):
    engine = make_engine(model, num_slots=1)
    short, queued = Request(1, PROMPT, 2), Request(2, PROMPT, 50)

    async def scenario():
        await engine.load(publish(model.reference))
        responses = {1: Response()}
        engine.submit([short])
        await finish(engine, responses)
        engine.submit([queued])
        return await engine.abort([1, 2, 99])

    (delta,) = run(scenario())
    assert (delta.request, delta.token_ids, delta.stop_reason) == (2, (), "abort")
    stats = engine.stats()
    assert (stats.kv_utilization, stats.num_running, stats.num_waiting) == (0.0, 0, 0)


def test_load_is_refused_while_requests_are_alive(make_engine, model):
    engine = make_engine(model)

    async def scenario():
        await engine.load(publish(model.reference, version=1))
        engine.submit([Request(1, PROMPT, 10)])
        with pytest.raises(RuntimeError, match=r"version 2 .* alive"):
            await engine.load(publish(model.reference, version=2))
        assert engine.stats().version == 1
        await engine.abort([1])
        await engine.load(publish(model.reference, version=2))

    run(scenario())
    assert engine.stats().version == 2


def test_nothing_is_decoded_before_the_first_load(make_engine, model):
    engine = make_engine(model)
    assert engine.stats().version is None
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit([Request(1, PROMPT, 10)])


def test_a_load_changes_what_is_decoded(make_engine, models):
    """Same shape, other weights; both versions' log-probs are exact, and nothing of the first is left in any cache."""
    old, new = models["qwen2_tied"], models["qwen2_tied_later"]
    engine = make_engine(old)
    requests = [Request(id_, PROMPT, 40, seed=id_) for id_ in range(4)]

    async def scenario():
        await engine.load(publish(old.reference, version=1))
        before = await decode(engine, requests)
        await engine.load(publish(new.reference, version=2))
        return before, await decode(engine, requests)

    before, after = run(scenario())
    assert tokens_of(before) != tokens_of(after)
    assert largest_error(old, requests, before) < LOGPROB_ERROR_MAX
    assert largest_error(new, requests, after) < LOGPROB_ERROR_MAX


def test_a_flipped_weight_is_caught_by_the_probe(make_engine, model):
    engine = make_engine(model)
    leased = publish(model.reference, version=7)
    entry = next(e for e in leased.manifest.tensors if e.name == "model.layers.1.mlp.down_proj.weight")
    corrupt = bytearray(leased.data)
    corrupt[entry.offset + 4 * 50 + 3] ^= 0x40  # the exponent's top bit of element 50

    async def scenario():
        with pytest.raises(WrongWeights, match=r"version 7: .*differs"):
            await engine.load(type(leased)(leased.manifest, 0, memoryview(bytes(corrupt))))
        assert engine.stats().version is None
        await engine.load(leased)
        return await decode(engine, [Request(1, PROMPT, 10)])

    (response,) = run(scenario())
    assert largest_error(model, [Request(1, PROMPT, 10)], [response]) < LOGPROB_ERROR_MAX


def test_requests_that_can_never_be_served_are_refused_by_name(make_engine, model):
    engine = make_engine(model, kv_capacity_tokens=256)
    refused = {
        r"20 \+ 237 = 257 .*kv_capacity_tokens=256": Request(1, PROMPT, 237),
        r"top_p=0.9": Request(1, PROMPT, 10, top_p=0.9),
        r"top_k=5": Request(1, PROMPT, 10, top_k=5),
        r"vocabulary of 96": Request(1, (96,), 10),
        r"at least 1": Request(1, PROMPT, 0),
        r"needs a prompt": Request(1, PROMPT, 10, position=20),
    }

    async def scenario():
        await engine.load(publish(model.reference))
        for message, request in refused.items():
            with pytest.raises(ValueError, match=message):
                engine.submit([Request(5, PROMPT, 10), request])
        with pytest.raises(ValueError, match="repeat"):
            engine.submit([Request(5, PROMPT, 10), Request(5, PROMPT, 10)])
        assert engine.stats().num_waiting == 0
        await decode(engine, [Request(1, PROMPT, 236)])

    run(scenario())


def test_a_request_longer_than_the_model_reaches_is_refused(make_engine, model):
    engine = make_engine(model, kv_capacity_tokens=65536)

    async def scenario():
        await engine.load(publish(model.reference))
        with pytest.raises(ValueError, match="max_position_embeddings=2048"):
            engine.submit([Request(1, PROMPT, 2029)])

    run(scenario())


def test_a_response_stops_at_its_stop_tokens_and_delivers_them(make_engine, model):
    """The request's own; and, with none given to the engine, those of the model's generation_config.json."""
    free, configured = make_engine(model), make_engine(model, stop_token_ids=None)
    plain = [Request(id_, PROMPT, 400, seed=id_) for id_ in range(8)]
    stopped = [Request(id_, PROMPT, 400, seed=id_, stop_token_ids=(2,)) for id_ in range(8)]

    async def scenario():
        await free.load(publish(model.reference))
        await configured.load(publish(model.reference))
        return await decode(free, plain), await decode(free, stopped), await decode(configured, plain)

    endless, by_request, by_model = run(scenario())
    assert tokens_of(by_request) == tokens_of(by_model)
    assert "stop" in {response.stop_reason for response in by_request}
    for whole, cut in zip(endless, by_request, strict=True):
        if cut.stop_reason == "stop":
            end = whole.token_ids.index(2) + 1
            assert cut.token_ids == whole.token_ids[:end]
        else:
            assert 2 not in whole.token_ids


def test_seeds_make_responses_distinct_and_reproducible(make_engine, model):
    group = [Request(id_, PROMPT, 40, seed=1000 + id_) for id_ in range(8)]

    async def scenario(engine):
        await engine.load(publish(model.reference))
        return await decode(engine, group), await decode(engine, group[3:4])

    (together, alone), (again, _) = run(scenario(make_engine(model))), run(scenario(make_engine(model)))
    assert len({tuple(response.token_ids) for response in together}) == 8
    assert tokens_of(together) == tokens_of(again)
    assert alone[0].token_ids == together[3].token_ids


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_1(make_engine, model):
    engine = make_engine(model)
    request = Request(1, PROMPT, 30, temperature=0.0)

    async def scenario():
        await engine.load(publish(model.reference))
        return (await decode(engine, [request]))[0]

    response = run(scenario())
    with torch.no_grad():
        logits = model.reference(torch.tensor([[*PROMPT, *response.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert response.token_ids == logits.argmax(-1).tolist()
    assert response.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=LOGPROB_ERROR_MAX)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (10, 0.6)])
def test_evaluation_may_truncate_and_draws_only_what_is_left(make_engine, model, top_k, top_p):
    engine = make_engine(model)
    requests = [
        Request(id_, PROMPT, 40, temperature=0.9, top_k=top_k, top_p=top_p, seed=id_, evaluation=True)
        for id_ in range(8)
    ]

    async def scenario():
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    responses = run(scenario())
    allowed = [allowed_tokens(model, response.token_ids, 0.9, top_k, top_p) for response in responses]
    drawn = [
        (token, keep)
        for response, keeps in zip(responses, allowed, strict=True)
        for token, keep in zip(response.token_ids, keeps, strict=True)
    ]
    assert all(token in keep for token, keep in drawn)
    assert any(token != keep[0] for token, keep in drawn), "only the likeliest token was ever drawn"
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX


def allowed_tokens(model, response: list[int], temperature: float, top_k: int, top_p: float) -> list[list[int]]:
    """For each place of the response, the tokens that top_k and then top_p leave, likeliest first."""
    with torch.no_grad():
        logits = model.reference(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1]
    allowed = []
    for row in (logits.double() / temperature).softmax(-1):
        probabilities, tokens = row.sort(descending=True)
        if top_k:
            probabilities, tokens = probabilities[:top_k], tokens[:top_k]
        before = (probabilities / probabilities.sum()).cumsum(0).roll(1)
        before[0] = 0.0
        allowed.append(tokens[before < top_p].tolist())
    return allowed


def test_a_cancelled_next_loses_nothing(make_engine, model):
    """A worker may give up waiting; what the engine decodes afterwards is complete."""
    engine = make_engine(model)
    request = Request(1, PROMPT, 20)

    async def scenario():
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


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]
