"""The learning rate over a run: it rises, stays or falls, and depends on nothing but the updates made before."""

import itertools
from pathlib import Path

import pytest
from pydantic import ValidationError

from laminar.config import BatchConfig, Config, DataConfig, ModelConfig, TrainerConfig
from laminar.train.learning_rate import learning_rate

NUM_UPDATES = 20


def make_config(**trainer: object) -> Config:
    """Five steps of four updates."""
    return Config(
        model=ModelConfig(path=Path("model")),
        data=DataConfig(train_files=(Path("train.parquet"),)),
        batch=BatchConfig(num_prompts_per_step=8, num_mini_batches=4),
        trainer=TrainerConfig.model_validate({"learning_rate": 1.0, "num_steps": 5, **trainer}),
    )


def rates(config: Config, num_updates: int = NUM_UPDATES) -> list[float]:
    return [learning_rate(config, num_done) for num_done in range(num_updates)]


def test_the_warm_up_rises_and_its_last_update_has_all_of_it():
    assert rates(make_config(num_warmup_updates=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_by_equal_parts_to_the_ratio_at_the_last_update_and_stays_there():
    found = rates(make_config(learning_rate_schedule="linear", learning_rate_min_ratio=0.1), NUM_UPDATES + 5)
    assert found[NUM_UPDATES - 1 :] == pytest.approx([0.1] * 6)
    falls = [before - after for before, after in itertools.pairwise(found[:NUM_UPDATES])]
    assert falls == pytest.approx([0.9 / NUM_UPDATES] * (NUM_UPDATES - 1))


def test_cosine_is_half_way_down_in_the_middle_of_what_follows_the_warm_up():
    found = rates(make_config(learning_rate_schedule="cosine", num_warmup_updates=4))
    assert found[4 + 7] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0, abs=1e-12)
    assert found == sorted(found[:4]) + sorted(found[4:], reverse=True)


def test_a_schedule_that_falls_wants_an_end():
    with pytest.raises(ValidationError, match=r"trainer\.num_steps"):
        make_config(learning_rate_schedule="cosine", num_steps=None)
