"""Checkpoints are written from a copy, beside training, by all ranks together, and are complete or absent."""

import resource
import threading

import pytest
import torch

from laminar.train.checkpoint import CheckpointNotSaved, list_complete, newest_complete
from laminar.train.ranks import ALONE
from laminar.train.saver import Saver
from laminar.train.trainer import Trainer
from tests.train.rank_processes import on_ranks
from tests.train.rank_work import save_while_training, save_with_a_full_disk

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def trainer(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path))
    trainer.train_mini_batch(1, 0, sample(trainer.model, 2))
    return trainer


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


def assert_holds(folder, state, trainer):
    restored = Trainer(trainer.config)
    restored.restore(folder)
    got = restored.state()
    assert [name for name in state if not torch.equal(got[name], state[name])] == []


def test_training_on_changes_nothing_of_what_is_being_saved(trainer, sample, tmp_path, monkeypatch):
    may_write, writes = threading.Event(), []

    def write_later(folder, state, ranks):
        assert may_write.wait(60)
        writes.append(folder)
        write_state(folder, state, ranks)

    from laminar.train.saver import write_state

    monkeypatch.setattr("laminar.train.saver.write_state", write_later)
    saver = Saver(tmp_path, 2, ALONE)
    at_save = copied(trainer)
    saver.begin(1, trainer.state())
    trainer.train_mini_batch(2, 0, sample(trainer.model, 2, seed=5))
    assert not torch.equal(
        trainer.state()["weight.model.embed_tokens.weight"], at_save["weight.model.embed_tokens.weight"]
    )
    with pytest.raises(CheckpointNotSaved, match="step 2 not begun: the one before is still being written"):
        saver.begin(2, trainer.state())
    assert newest_complete(tmp_path) is None
    may_write.set()
    saver.finish()
    assert len(writes) == 1
    assert_holds(newest_complete(tmp_path).folder, at_save, trainer)


def test_old_ones_are_deleted_and_the_copy_s_memory_is_used_again(trainer, sample, tmp_path):
    saver = Saver(tmp_path, 2, ALONE)
    for step in (1, 2, 3):
        at_save = copied(trainer)
        saver.begin(step, trainer.state())
        saver.finish()
        trainer.train_mini_batch(step + 1, 0, sample(trainer.model, 2, seed=step))
    assert [checkpoint.step for checkpoint in list_complete(tmp_path)] == [2, 3]
    assert_holds(tmp_path / "step_3", at_save, trainer)
    saver.close()


def test_a_full_disk_is_named_and_the_next_checkpoint_works_again(trainer, tmp_path):
    saver = Saver(tmp_path, 2, ALONE)
    saver.begin(1, trainer.state())
    saver.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        saver.begin(2, trainer.state())
        with pytest.raises(CheckpointNotSaved, match=r"step 2 not saved .*rank 0.*newest complete one is .*step_1"):
            saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    saver.begin(3, trainer.state())
    saver.finish()
    assert [checkpoint.step for checkpoint in list_complete(tmp_path)] == [1, 3]


def test_two_ranks_save_while_they_train_and_one_s_full_disk_costs_both_that_checkpoint(
    qwen2_path, make_config, sample, tmp_path
):
    config = make_config(qwen2_path, num_ranks=2)
    model = Trainer(make_config(qwen2_path)).model
    steps = [sample(model, 2, seed=seed) for seed in (1, 2)]
    first, second = on_ranks(config, save_while_training, config, steps, tmp_path / "good")
    assert [checkpoint.step for checkpoint in list_complete(tmp_path / "good")] == [1]
    assert_holds(tmp_path / "good" / "step_1", first, Trainer(make_config(qwen2_path)))
    assert first.keys() == second.keys()

    failures = on_ranks(config, save_with_a_full_disk, config, tmp_path / "full")
    assert all("rank 1: " in failure for failure in failures), failures
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["step_1"]
