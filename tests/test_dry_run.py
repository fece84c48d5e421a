"""`laminar run --dry-run` computes what a run takes of memory, and says before it starts what cannot fit."""

import json
import re
import shutil
from pathlib import Path

import pytest

from laminar.dry_run import dry_run
from laminar.rollout.engines.architecture import read_architecture
from laminar.rollout.engines.memory import num_parameters
from laminar.settings import load_config

ROOT = Path(__file__).parents[1]
WARM = ROOT / "examples" / "iterate" / "warm"
DAPO = ROOT.parent / "shared" / "data" / "dapo_math_17k" / "dapo_math_17k.parquet"
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
"""As published with the model."""


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that looks like Qwen2.5-7B's, without its weights and with another tokenizer: nothing is loaded."""
    folder = tmp_path / "Qwen2.5-7B"
    shutil.copytree(WARM, folder)
    (folder / "config.json").write_text(json.dumps(QWEN2_5_7B))
    return folder


def run_dry(model: Path, *overrides: str) -> int:
    data = f"data.train_files=[{ROOT}/examples/iterate/data/train.parquet]"
    return dry_run(load_config(ROOT / "configs" / "dapo_7b.yaml", [f"model.path={model}", data, *overrides]))


def test_the_recipe_for_a_7b_model_fits_and_says_how(model, capsys):
    """7.62 G parameters x 2 bytes = 14.2 GiB; a token's KV is 2 x 28 x 4 x 128 x 2 = 57,344 bytes."""
    assert num_parameters(read_architecture(model)) == 7_615_616_512
    assert run_dry(model) == 0
    told = capsys.readouterr().out
    assert "4 replicas on 4 GPUs" in told
    assert "7.62 G parameters x 2 bytes (bfloat16) / 1 = 14.2 GiB" in told
    assert "= 57344 bytes" in told
    assert "a weight version is 28.4 GiB (float32)" in told
    budget, weights, workspace, cache = map(
        float, re.findall(r"([\d.]+) GiB budget - ([\d.]+) weights - ([\d.]+) workspace -> ([\d.]+) GiB of KV", told)[0]
    )
    assert budget == 68.0
    assert cache == pytest.approx(budget - weights - workspace, abs=0.15)
    (capacity,) = re.findall(r"([\d,]+) KV tokens", told)
    assert int(capacity.replace(",", "")) == pytest.approx(cache * 2**30 / 57344, rel=0.01)


def test_two_ranks_halve_what_each_holds(model, capsys):
    run_dry(model, "engine.tensor_parallel_size=2")
    told = capsys.readouterr().out
    assert "4 replicas on 8 GPUs" in told
    assert "/ 2 = 7.1 GiB of weights on each GPU of a replica" in told
    assert "= 28672 bytes" in told


def test_what_a_trainer_rank_takes_is_told(model, capsys):
    """7.62 G parameters x 16 bytes are 113.5 GiB, a quarter of them on each of four GPUs."""
    run_dry(model)
    told = capsys.readouterr().out
    assert "4 trainer ranks on 4 GPUs" in told
    assert "7.62 G parameters x 16 bytes (float32 weights, gradients, AdamW) / 4 = 28.4 GiB" in told
    (parts,) = re.findall(r"([\d.]+) state \+ ([\d.]+) .* \+ ([\d.]+) activ.* \+ ([\d.]+) runtime = ([\d.]+) GiB", told)
    *added, needed = map(float, parts)
    assert sum(added) == pytest.approx(needed, abs=0.2)
    run_dry(model, "trainer.kl_coefficient=0.001")
    assert "x 20 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.num_ranks=1"], "113.5 state .* GiB; raise trainer.num_ranks"),
        (["trainer.activation_checkpointing=false"], "83.1 activations of 16,384 tokens"),
        (["engine.device_memory_gib=16"], "14.2 GiB of weights .*raise engine.tensor_parallel_size"),
        (["engine.kv_capacity_tokens=4000000"], "213.6 GiB of KV cache"),
        (["data.response_tokens_max=130000"], "131072 positions"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(model, overrides, message):
    with pytest.raises(ValueError, match=message):
        run_dry(model, *overrides)


@pytest.mark.skipif(not DAPO.is_file(), reason=f"{DAPO} is not here")
def test_the_recipe_takes_dapo_math_17k_as_it_is_published(model, capsys):
    """With the tokenizer of the tiny model, which knows few words: a prompt is longer, and none is left out for it."""
    assert run_dry(model, f"data.train_files=[{DAPO}]", "data.prompt_tokens_max=20000") == 0
    told = capsys.readouterr().out
    (num_prompts,) = re.findall(r"# (\d+) prompts, 0 held out", told)
    assert 17_000 < int(num_prompts) <= 17_917
