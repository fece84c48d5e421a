"""Which checkpoints the embedded engine takes, and what it says about the others."""

import json

import pytest
import torch

from laminar.config import EmbeddedEngineConfig
from laminar.rollout.engines.architecture import read_architecture, read_stop_token_ids
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from tests.rollout.engines.driving import decode, run
from tests.rollout.engines.published import publish, reference_logprobs


@pytest.mark.parametrize("name", ["llama_biased", "llama3_rope", "linear_rope"])
def test_variants_of_llama_equal_transformers(models, name):
    model = models[name]
    engine = EmbeddedEngine(EmbeddedEngineConfig(), model.path, stop_token_ids=())
    request = Request(1, tuple(range(5, 90)), 120)

    async def scenario():
        await engine.load(publish(model.reference))
        return (await decode(engine, [request]))[0]

    response = run(scenario())
    expected = reference_logprobs(model.reference, request.token_ids, tuple(response.token_ids))
    assert torch.tensor(response.logprobs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_parameters=.*'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling=.*'dynamic'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ],
)
def test_what_is_not_implemented_is_refused_by_field(model, tmp_path, fields, message):
    config = json.loads((model.path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_architecture(tmp_path)


def test_configurations_of_transformers_4_are_read_alike(models, tmp_path):
    """They have rope_theta and rope_scaling where those of 5 have rope_parameters."""
    path = models["llama3_rope"].path
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == read_architecture(path)


def test_stop_tokens_come_from_the_generation_config_first(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_stop_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_stop_token_ids(tmp_path) == (5, 6)


def test_a_budget_below_one_block_is_refused(model):
    with pytest.raises(ValueError, match=r"kv_capacity_tokens=10 is not one block"):
        EmbeddedEngine(EmbeddedEngineConfig(kv_capacity_tokens=10), model.path)
