"""Orders the training prompts: which id comes at which position of which epoch."""

import random

from laminar.config import Config
from laminar.control.messages import PromptId
from laminar.control.state import ClusterState


class PromptOrder:
    """A new permutation each epoch, a function of (seed, epoch) alone: a resumed run visits the same prompts."""

    def __init__(self, config: Config, num_prompts: int) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._epoch = -1
        self._order: list[int] = []

    def num_left(self, state: ClusterState) -> int:
        """Prompts not yet dispatched, over all the epochs."""
        num_epochs_left = self._config.data.num_epochs - state.epoch
        return max(0, num_epochs_left * self._num_prompts - state.position)

    def take(self, state: ClusterState) -> PromptId:
        """The next prompt; advances the cursor in `state`."""
        assert self.num_left(state) > 0, "the prompts are exhausted"
        if self._epoch != state.epoch:
            self._order = self._draw(state.epoch)
            self._epoch = state.epoch
        prompt = PromptId(self._order[state.position])
        state.position += 1
        if state.position == self._num_prompts:
            state.epoch, state.position = state.epoch + 1, 0
        return prompt

    def _draw(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        if self._config.data.shuffle:
            random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
        return order
