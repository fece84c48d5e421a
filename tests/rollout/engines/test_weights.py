"""What a published version must hold to be loaded, and what is left of it afterwards."""

import copy

import msgspec
import pytest
import torch

from laminar.config import EmbeddedEngineConfig
from laminar.relay.manifest import Probe, TensorEntry
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request, WrongWeights
from tests.rollout.engines.driving import decode, run
from tests.rollout.engines.published import publish, reference_logprobs, with_tensors

PROMPT = tuple(range(5, 25))
NORM = "model.norm.weight"


def change(entries: tuple[TensorEntry, ...], **fields) -> tuple[TensorEntry, ...]:
    return tuple(msgspec.structs.replace(e, **fields) if e.name == NORM else e for e in entries)


MISFITS = {
    "missing: model.norm.weight": lambda entries: tuple(e for e in entries if e.name != NORM),
    "not of this model: model.extra.weight": lambda entries: (
        *entries,
        TensorEntry("model.extra.weight", "float32", (4,), 0, 16),
    ),
    r"wrong: model.norm.weight \(shape \[47\], expected \[48\]": lambda entries: change(entries, shape=(47,)),
    r"wrong: model.norm.weight \(dtype int8": lambda entries: change(entries, dtype="int8"),
    r"wrong: model.norm.weight \(188 bytes": lambda entries: change(entries, num_bytes=188),
    r"wrong: model.norm.weight \(192 bytes at 99999999": lambda entries: change(entries, offset=99999999),
    "stated twice": lambda entries: (*entries, entries[0]),
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_version_that_does_not_fit_is_refused_before_anything_is_overwritten(models, message):
    old, new = models["qwen2_tied"], models["qwen2_tied_later"]
    engine = EmbeddedEngine(EmbeddedEngineConfig(), old.path, stop_token_ids=())
    fitting = publish(new.reference, version=2)
    misfit = with_tensors(fitting, MISFITS[message](fitting.manifest.tensors))

    async def scenario():
        await engine.load(publish(old.reference, version=1))
        with pytest.raises(WrongWeights, match=f"version 2 does not fit .*{message}"):
            await engine.load(misfit)
        assert engine.stats().version == 1
        return (await decode(engine, [Request(1, PROMPT, 20)]))[0]

    response = run(scenario())
    expected = reference_logprobs(old.reference, PROMPT, tuple(response.token_ids))
    assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "qwen3", "llama_biased"])
def test_a_version_in_bfloat16_is_served_in_float32(models, name):
    model = models[name]
    rounded = copy.deepcopy(model.reference)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = EmbeddedEngine(EmbeddedEngineConfig(), model.path, stop_token_ids=())

    async def scenario():
        await engine.load(publish(rounded, dtype=torch.bfloat16))
        return (await decode(engine, [Request(1, PROMPT, 40)]))[0]

    response = run(scenario())
    expected = reference_logprobs(rounded, PROMPT, tuple(response.token_ids))
    assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_lease_may_end_as_soon_as_load_returns(model):
    engine = EmbeddedEngine(EmbeddedEngineConfig(), model.path, stop_token_ids=())
    segment = bytearray(publish(model.reference).data)
    leased = msgspec.structs.replace(publish(model.reference), data=memoryview(segment).toreadonly())

    async def scenario():
        await engine.load(leased)
        leased.data.release()
        segment[:] = bytes(len(segment))
        return (await decode(engine, [Request(1, PROMPT, 20)]))[0]

    response = run(scenario())
    expected = reference_logprobs(model.reference, PROMPT, tuple(response.token_ids))
    assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_version_without_a_probe_is_refused(model):
    """Nothing to check means nothing was checked."""
    engine = EmbeddedEngine(EmbeddedEngineConfig(), model.path, stop_token_ids=())
    leased = publish(model.reference, version=3)
    for probe in (Probe((), (), 1e-4), Probe((1, 2, 3), (0.0,), 1e-4)):
        manifest = msgspec.structs.replace(leased.manifest, probe=probe)
        with pytest.raises(WrongWeights, match=r"version 3 .*cannot be checked"):
            run(engine.load(msgspec.structs.replace(leased, manifest=manifest)))
        assert engine.stats().version is None
