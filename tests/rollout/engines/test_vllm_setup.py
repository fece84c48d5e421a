"""What is decided about vLLM before it starts: needs none."""

import importlib.util
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from laminar.config import VllmEngineConfig
from laminar.rollout.engines import vllm_folder
from laminar.rollout.engines.architecture import kv_bytes_per_token, read_architecture, tensor_shapes
from laminar.rollout.engines.sampling import seed_at
from laminar.rollout.engines.vllm_folder import VllmFolder, remove_abandoned
from laminar.rollout.engines.vllm_setup import prepare_environment, start_vllm
from laminar.settings import load_config
from tests.rollout.engines.driving import run

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_how_to_get_it(model):
    with pytest.raises(ValueError, match=r"engine.kind=vllm, .*pip install 'laminar-rl\[vllm\]'"):
        run(start_vllm(VllmEngineConfig(), model.path, num_tokens_max=100))


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "qwen3", "llama", "llama_biased"])
def test_the_shapes_of_a_model_are_those_of_its_checkpoint(models, name):
    """Of what the trainer publishes: every parameter, tied ones once."""
    reference = models[name].reference
    expected = {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    assert tensor_shapes(read_architecture(models[name].path)) == expected


def test_a_token_has_a_key_and_a_value_in_every_layer(models):
    """3 layers, 2 KV heads of 12."""
    assert kv_bytes_per_token(read_architecture(models["qwen2_tied"].path), element_bytes=2) == 2 * 3 * 2 * 12 * 2


def test_seeds_differ_by_position_and_by_response():
    seeds = {seed_at(seed, position) for seed in range(20) for position in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_at(3, 7) == seed_at(3, 7)


def test_what_the_user_set_in_the_environment_stays(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_environment(VllmEngineConfig(device="cpu", kv_capacity_tokens=64))
    assert os.environ["VLLM_LOGGING_LEVEL"] == os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_a_folder_goes_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_folder.tempfile, "tempdir", str(tmp_path))
    first = VllmFolder()
    second = VllmFolder()
    assert first.path.exists(), "another engine removed the folder of one that lives"
    # As the kernel does when the process ends, however it ends.
    os.close(first._lock)
    assert remove_abandoned() == 1
    assert not first.path.exists()
    assert second.path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "vllm", "num_slot": 3}, "engine.num_slot: no such setting; did you mean engine.num_slots"),
        ({"kind": "vllm", "paced": {}}, "engine.paced: no such setting with this engine.kind"),
        ({"kind": "vlm"}, "'embedded', 'vllm'"),
        ({"kind": "vllm", "device": "cpu"}, "device: cpu needs kv_capacity_tokens"),
        ({"kind": "vllm", "device": "cpu", "kv_capacity_tokens": 640, "block_tokens": 16}, "multiple of 32"),
        ({"kind": "vllm", "kv_capacity_tokens": 320}, "one trajectory may need .* = 352 KV tokens"),
    ],
)
def test_settings_that_vllm_cannot_have_are_refused_by_name(tmp_path, engine, message):
    config = tmp_path / "config.yaml"
    text = QUICKSTART.read_text()
    begin, end = text.index("engine:"), text.index("repack:")
    config.write_text(f"{text[:begin]}engine: {engine}\n{text[end:]}")
    with pytest.raises(ValueError, match=message):
        load_config(config)


def test_settings_without_a_kind_are_the_embedded_engines(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(QUICKSTART.read_text().replace("  kind: embedded\n", ""))
    assert load_config(config).engine.kind == "embedded"


def test_a_device_ratio_above_one_is_refused():
    with pytest.raises(ValidationError, match="device_memory_ratio"):
        VllmEngineConfig(device_memory_ratio=1.1)
