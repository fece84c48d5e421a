"""Gives the tests of whole workers a relay with two versions, and controllers to play with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.controller_end import Controller, make_config, make_prompts
from tests.rollout.trainer_end import TrainerEnd

MakeController = Callable[..., Controller]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def published() -> Iterator[TrainerEnd]:
    """A relay that holds versions 0 and 1, and their weights."""
    end = TrainerEnd(make_config())
    end.publish_complete()
    end.publish_complete()
    yield end
    end.close()


@pytest.fixture
def make_controller(tmp_path: Path) -> Iterator[MakeController]:
    made: list[Controller] = []

    def make(*, extra_info: dict[str, Any] | None = None, **config: Any) -> Controller:
        folder = tmp_path / f"controller-{len(made)}"
        made.append(Controller(make_config(**config), folder, make_prompts(extra_info)))
        return made[-1]

    yield make
    for controller in made:
        controller.payload.close()
