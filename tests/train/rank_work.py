"""What the tests let each rank do, in a process of its own."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from laminar.config import Config
from laminar.data.records import Experience
from laminar.train.mini_batch import prepare
from laminar.train.policy import whole
from laminar.train.ranks import Ranks
from laminar.train.trainer import Trainer


def gradient(trainer: Trainer, experiences: Sequence[Experience]) -> torch.Tensor | None:
    """Of all weights, end to end; none where nothing is learnt."""
    trainer.policy.zero_grad()
    trainer.accumulate_gradient(prepare(experiences, trainer.config, trainer.version))
    gradients = [parameter.grad for _, parameter in trainer.policy.weights() if parameter.grad is not None]
    return torch.cat([whole(each).flatten() for each in gradients]) if gradients else None


def gradients_of(ranks: Ranks, cases: Sequence[tuple[Config, Path, Sequence[Experience]]]) -> list[torch.Tensor | None]:
    """For each case, of a trainer restored from the folder."""
    found = []
    for config, folder, experiences in cases:
        trainer = Trainer(config, ranks)
        trainer.restore(folder)
        found.append(gradient(trainer, experiences))
    return found


def train_steps(ranks: Ranks, config: Config, steps: Sequence[Sequence[Experience]], save_to: Path) -> dict[str, Any]:
    """A step from each of `steps`, then a checkpoint; what came of it."""
    trainer = Trainer(config, ranks)
    metrics = [trainer.train_mini_batch(step, 0, experiences) for step, experiences in enumerate(steps, start=1)]
    trainer.save(save_to)
    return {"metrics": metrics} | outcome(trainer)


def restored(ranks: Ranks, config: Config, folder: Path, experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """What a trainer restored from the folder is, and what it is after one step more."""
    trainer = Trainer(config, ranks)
    trainer.restore(folder)
    before = outcome(trainer)
    trainer.train_mini_batch(trainer.num_steps_done + 1, 0, experiences)
    return [before, outcome(trainer)]


def outcome(trainer: Trainer) -> dict[str, Any]:
    return {
        "weights": {name: copy.deepcopy(weight) for name, weight in trainer.weights()},
        "state": {name: whole(tensor).clone() for name, tensor in trainer.state().items()},
        "probe": trainer.probe(),
        "dtypes": {tensor.dtype for name, tensor in trainer.state().items() if name.startswith("weight.")},
    }
