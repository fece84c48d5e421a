"""No engine queues what it can never serve, or what must not be trained on."""

import pytest

from laminar.rollout.engines.engine import Request
from tests.rollout.engines.contract.comparing import PROMPT
from tests.rollout.engines.contract.conftest import TIGHT
from tests.rollout.engines.driving import decode
from tests.rollout.engines.published import publish

REFUSED = {
    r"20 \+ 493 = 513 .*kv_capacity_tokens=512": Request(1, PROMPT, 493),
    r"top_p=0.9": Request(1, PROMPT, 10, top_p=0.9),
    r"top_k=5": Request(1, PROMPT, 10, top_k=5),
    r"vocabulary of 96": Request(1, (96,), 10),
    r"at least 1": Request(1, PROMPT, 0),
    r"needs a prompt": Request(1, PROMPT, 10, position=20),
}


def test_requests_that_can_never_be_served_are_refused_by_name(run, make_engine, model):
    async def scenario():
        engine = await make_engine(model, TIGHT)
        await engine.load(publish(model.reference))
        for message, request in REFUSED.items():
            with pytest.raises(ValueError, match=message):
                engine.submit([Request(5, PROMPT, 10), request])
        with pytest.raises(ValueError, match="repeat"):
            engine.submit([Request(5, PROMPT, 10), Request(5, PROMPT, 10)])
        assert engine.stats().num_waiting == 0
        return await decode(engine, [Request(1, PROMPT, 492)])

    (longest,) = run(scenario())
    assert (len(longest.token_ids), longest.stop_reason) == (492, "length")


def test_a_request_longer_than_the_model_reaches_is_refused(run, make_engine, model):
    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        with pytest.raises(ValueError, match="max_position_embeddings=2048"):
            engine.submit([Request(1, PROMPT, 2029)])

    run(scenario())
