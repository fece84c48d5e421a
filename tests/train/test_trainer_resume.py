import resource

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from laminar.train.checkpoint import CheckpointNotSaved, list_complete, newest_complete, save_complete
from laminar.train.export import export_hf
from laminar.train.sharded_state import METADATA_FILE
from laminar.train.trainer import Trainer


@pytest.fixture
def config(qwen2_path, make_config):
    return make_config(qwen2_path, num_warmup_updates=6, weight_decay=0.1)


def train_step(trainer, sample, step):
    trainer.version = step - 1
    return [
        trainer.train_mini_batch(step, index, sample(trainer.model, 2, seed=10 * step + index)) for index in range(2)
    ]


def test_after_a_restore_the_next_step_is_the_same_bit_for_bit(config, sample, tmp_path):
    trainer = Trainer(config)
    for step in (1, 2):
        train_step(trainer, sample, step)
    save_complete(tmp_path, trainer.num_steps_done, trainer.save)
    torch.manual_seed(123)
    drawn = torch.rand(3)
    restored = Trainer(config)
    restored.restore(newest_complete(tmp_path).folder)
    assert restored.num_steps_done == 2
    assert not torch.equal(torch.rand(3), drawn)

    expected, got = train_step(trainer, sample, 3), train_step(restored, sample, 3)
    assert got == expected
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trainer.weights(), restored.weights(), strict=True))
    assert restored.probe() == trainer.probe()


def test_the_random_state_is_restored(config, tmp_path):
    trainer = Trainer(config)
    torch.rand(5)
    trainer.save(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(99)
    trainer.restore(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_disk_too_small_for_the_state_is_named(config, tmp_path):
    trainer = Trainer(config)
    save_complete(tmp_path, 1, trainer.save)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointNotSaved, match="step 2 not saved"):
            save_complete(tmp_path, 2, trainer.save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [checkpoint.step for checkpoint in list_complete(tmp_path)] == [1]
    Trainer(config).restore(tmp_path / "step_1")


@pytest.fixture
def model_with_tokenizer(qwen2_path, tmp_path):
    """The tiny model as it is published: bfloat16, a tokenizer with a chat template, generation settings."""
    folder = tmp_path / "original"
    model = AutoModelForCausalLM.from_pretrained(qwen2_path, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[5, 7], pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<stop>": 0, "a": 1, "?": 2}, unk_token="?")), eos_token="<stop>"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


def test_an_export_loads_in_hugging_face(model_with_tokenizer, make_config, sample, tmp_path):
    trainer = Trainer(make_config(model_with_tokenizer))
    train_step(trainer, sample, 1)
    folder = save_complete(tmp_path / "checkpoints", 1, trainer.save).folder
    export_hf(folder, model_with_tokenizer, tmp_path / "export")

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.dtype == torch.bfloat16
    state = exported.state_dict()
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in trainer.weights())
    assert exported.generation_config.eos_token_id == [5, 7]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer("a")["input_ids"] == [1]
    assert not list((tmp_path / "export").glob("*.bin"))

    with pytest.raises(ValueError, match="is not empty"):
        export_hf(folder, model_with_tokenizer, tmp_path / "export")
    (folder / METADATA_FILE).unlink()
    with pytest.raises(ValueError, match="is no checkpoint"):
        export_hf(folder, model_with_tokenizer, tmp_path / "other")
