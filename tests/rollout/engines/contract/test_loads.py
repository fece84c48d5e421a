"""Every engine serves the version that it says, and takes one in only while it is empty."""

import pytest

from laminar.rollout.engines.engine import Request, WrongWeights
from tests.rollout.engines.contract.comparing import LOGPROB_ERROR_MAX, PROMPT, largest_error, tokens_of
from tests.rollout.engines.driving import decode
from tests.rollout.engines.published import lend, publish


def test_nothing_is_decoded_before_the_first_load(run, make_engine, models):
    """On a model that no test before has taken, so that its engine is new."""

    async def scenario():
        engine = await make_engine(models["llama"])
        assert engine.stats().version is None
        with pytest.raises(RuntimeError, match="no weights"):
            engine.submit([Request(1, PROMPT, 10)])

    run(scenario())


def test_load_is_refused_while_requests_are_alive(run, make_engine, model):
    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference, version=1))
        engine.submit([Request(1, PROMPT, 10)])
        with pytest.raises(RuntimeError, match=r"version 2 .* alive"):
            await engine.load(publish(model.reference, version=2))
        assert engine.stats().version == 1
        await engine.abort([1])
        await engine.load(publish(model.reference, version=2))
        return engine.stats().version

    assert run(scenario()) == 2


@pytest.mark.parametrize("parallel", [1, 2], ids=["one rank", "two ranks"])
def test_a_load_changes_what_is_decoded(run, make_engine, models, parallel):
    """Same shape, other weights; both versions' log-probs are exact, and nothing of the first is left in any cache."""
    if parallel > 1 and make_engine.kind == "embedded":
        pytest.skip("the embedded engine is one process on one core")
    old, new = models["qwen2_tied"], models["qwen2_tied_later"]
    requests = [Request(id_, PROMPT, 40, seed=id_) for id_ in range(4)]

    async def scenario():
        engine = await make_engine(old, tensor_parallel_size=parallel)
        await engine.load(publish(old.reference, version=1))
        before = await decode(engine, requests)
        await engine.load(publish(new.reference, version=2))
        return before, await decode(engine, requests)

    before, after = run(scenario())
    assert tokens_of(before) != tokens_of(after)
    assert largest_error(old, requests, before) < LOGPROB_ERROR_MAX
    assert largest_error(new, requests, after) < LOGPROB_ERROR_MAX


def test_a_flipped_weight_is_caught_by_the_probe(run, make_engine, model):
    leased = publish(model.reference, version=7)
    entry = next(e for e in leased.manifest.tensors if e.name == "model.layers.1.mlp.down_proj.weight")
    corrupt = bytearray(leased.data)
    corrupt[entry.offset + 4 * 50 + 3] ^= 0x40  # the exponent's top bit of element 50

    async def scenario():
        engine = await make_engine(model)
        with pytest.raises(WrongWeights, match=r"version 7: .*differs"):
            await engine.load(lend(leased.manifest, bytes(corrupt)))
        assert engine.stats().version is None
        with pytest.raises(RuntimeError, match="no weights"):
            engine.submit([Request(1, PROMPT, 10)])
        await engine.load(leased)
        return await decode(engine, [Request(1, PROMPT, 10)])

    (response,) = run(scenario())
    assert largest_error(model, [Request(1, PROMPT, 10)], [response]) < LOGPROB_ERROR_MAX
