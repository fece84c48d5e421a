"""Computes the learning rate of an optimizer update: a warm-up, then constant, linear or cosine."""

import math
from typing import assert_never

from laminar.config import Config


def learning_rate(config: Config, num_updates_done: int) -> float:
    """That of the next update, a function of how many were made before it, so a resumed run goes on where it was.

    It rises linearly over the warm-up, whose last update has it whole. A schedule that falls reaches
    `learning_rate_min_ratio` of it at the last update of `trainer.num_steps`, and stays there.
    """
    trainer = config.trainer
    num_warmup = trainer.num_warmup_updates
    if num_updates_done < num_warmup:
        return trainer.learning_rate * (num_updates_done + 1) / num_warmup
    if trainer.learning_rate_schedule == "constant":
        return trainer.learning_rate
    assert trainer.num_steps is not None, "the configuration refuses a falling schedule without an end"
    num_falling = trainer.num_steps * config.batch.num_mini_batches - num_warmup
    progress = min(1.0, (num_updates_done + 1 - num_warmup) / max(1, num_falling))
    match trainer.learning_rate_schedule:
        case "linear":
            height = 1 - progress
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(trainer.learning_rate_schedule)
    lowest = trainer.learning_rate_min_ratio
    return trainer.learning_rate * (lowest + (1 - lowest) * height)
