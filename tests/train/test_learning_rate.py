import math
from itertools import pairwise

import pytest

from laminar.config import Config
from laminar.settings import parse_config
from laminar.train.learning_rate import learning_rate


def config(**trainer) -> Config:
    """10 steps of 4 updates each."""
    values = {
        "model": {"path": "unused"},
        "data": {"train_files": ["unused.parquet"]},
        "batch": {"num_prompts_per_step": 8, "num_mini_batches": 4},
        "trainer": {"learning_rate": 2.0, "num_steps": 10, **trainer},
    }
    return parse_config(values, "test")


def rates(num_updates: int, **trainer) -> list[float]:
    settings = config(**trainer)
    return [learning_rate(settings, done) for done in range(num_updates)]


def test_constant_is_constant_after_the_warm_up():
    assert rates(6, num_warmup_updates=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(2) == [2.0, 2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_schedule_ends_at_its_minimum_with_the_last_update_of_the_run(schedule):
    seen = rates(50, learning_rate_schedule=schedule, learning_rate_min_ratio=0.1, num_warmup_updates=8)
    assert max(seen) == seen[7] == 2.0
    assert all(a > b for a, b in pairwise(seen[7:40]))
    assert seen[39] == pytest.approx(0.2)
    assert seen[40:] == [seen[39]] * 10, "a run that makes more updates than it said stays there"


def test_the_shapes_are_what_they_are_called():
    linear = rates(40, learning_rate_schedule="linear")
    assert linear[19] == pytest.approx(1.0) and linear[29] == pytest.approx(0.5)
    cosine = rates(40, learning_rate_schedule="cosine")
    assert cosine[19] == pytest.approx(1.0) and cosine[29] == pytest.approx(1 + math.cos(0.75 * math.pi))


def test_a_warm_up_longer_than_the_run_is_no_error():
    assert rates(45, learning_rate_schedule="cosine", num_warmup_updates=60)[-1] == pytest.approx(1.5)


def test_a_falling_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"learning_rate_schedule=cosine falls .* trainer.num_steps"):
        config(learning_rate_schedule="cosine", num_steps=None)
