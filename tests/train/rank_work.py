"""What the tests let each rank do, in a process of its own."""

import copy
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from laminar.config import Config
from laminar.data.records import Experience
from laminar.train.mini_batch import prepare
from laminar.train.policy import whole
from laminar.train.ranks import Ranks
from laminar.train.saver import Saver
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


def save_while_training(
    ranks: Ranks, config: Config, steps: Sequence[Sequence[Experience]], root: Path
) -> dict[str, torch.Tensor]:
    """Begin a checkpoint after the first step, go on with the second; what the state was at the copy."""
    trainer, saver = Trainer(config, ranks), Saver(root, 2, ranks)
    trainer.train_mini_batch(1, 0, steps[0])
    at_copy = outcome(trainer)["state"]
    saver.begin(1, trainer.state())
    trainer.train_mini_batch(2, 0, steps[1])
    saver.finish()
    return at_copy


def save_with_a_full_disk(ranks: Ranks, config: Config, root: Path) -> str:
    """A good checkpoint, then one for which only rank 1 has no room; what it fails with."""
    trainer, saver = Trainer(config, ranks), Saver(root, 2, ranks)
    saver.begin(1, trainer.state())
    saver.finish()
    if not ranks.is_first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
    saver.begin(2, trainer.state())
    try:
        saver.finish()
    except OSError as error:
        return str(error)
    return "nothing"
