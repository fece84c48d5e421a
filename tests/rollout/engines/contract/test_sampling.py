"""What every engine draws: by the seed, within what an evaluation leaves, up to a stop token."""

import pytest
import torch

from laminar.rollout.engines.engine import Request
from tests.rollout.engines.contract.comparing import PROMPT, tokens_of
from tests.rollout.engines.driving import decode
from tests.rollout.engines.published import publish


def test_seeds_make_responses_distinct_and_reproducible(run, make_engine, model):
    group = [Request(id_, PROMPT, 40, seed=1000 + id_) for id_ in range(8)]

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        return await decode(engine, group), await decode(engine, group[3:4])

    (together, alone), (again, _) = run(scenario()), run(scenario())
    assert len({tuple(response.token_ids) for response in together}) == 8
    assert tokens_of(together) == tokens_of(again)
    assert alone[0].token_ids == together[3].token_ids


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (10, 0.6)])
def test_evaluation_may_truncate_and_draws_only_what_is_left(run, make_engine, model, top_k, top_p):
    requests = [
        Request(id_, PROMPT, 40, temperature=0.9, top_k=top_k, top_p=top_p, seed=id_, evaluation=True)
        for id_ in range(8)
    ]

    async def scenario():
        engine = await make_engine(model)
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


def test_a_response_stops_at_its_stop_tokens_and_delivers_them(run, make_engine, model):
    """The request's own; and, with none given to the engine, those of the model's generation_config.json."""
    plain = [Request(id_, PROMPT, 400, seed=id_) for id_ in range(8)]
    stopped = [Request(id_, PROMPT, 400, seed=id_, stop_token_ids=(2,)) for id_ in range(8)]

    async def scenario():
        free, configured = await make_engine(model), await make_engine(model, stop_token_ids=None)
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
