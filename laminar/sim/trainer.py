"""Pretends to be the trainer: mini-batches by their tokens, the hand-over by the weights' bytes."""

from collections.abc import Callable, Iterable

from laminar.control.messages import (
    AnyEvent,
    CheckpointSaved,
    HandedOver,
    MiniBatchTrained,
    Publish,
    SaveCheckpoint,
    TrainMiniBatch,
)
from laminar.sim.clock import Clock
from laminar.sim.relays import SimulatedRelays
from laminar.sim.shape import Shape
from laminar.sim.workload import Workload

CHECKPOINT_S = 0.1
"""What saving holds the trainer up for; the rest is written while it trains on."""


class SimulatedTrainer:
    """Does one thing after the other, as control orders them."""

    def __init__(
        self, clock: Clock, shape: Shape, workload: Workload, relays: SimulatedRelays, *, prompt_tokens: int
    ) -> None:
        self.step = 0
        """Steps handed over."""
        self.published_at_s = 0.0
        """When the newest hand-over was ordered."""
        self.tokens_of_step = 0
        """Prompt and response tokens of the step in training, so far."""
        self.training_s = 0.0
        """Seconds of all mini-batches done or begun."""
        self.alive = True
        self._clock = clock
        self._shape = shape
        self._workload = workload
        self._relays = relays
        self._prompt_tokens = prompt_tokens

    def train(self, command: TrainMiniBatch) -> None:
        num_tokens = sum(self._prompt_tokens + self._workload.response(id).num_tokens for id in command.trajectories)
        self.tokens_of_step = num_tokens + (self.tokens_of_step if command.index else 0)
        trained = MiniBatchTrained(command.id, command.step, command.index)
        seconds = num_tokens * self._shape.train_s_per_token
        self.training_s += seconds
        self._after(seconds, lambda: (trained,))

    def publish(self, command: Publish) -> None:
        self.published_at_s = self._clock.now

        def hand_over() -> Iterable[AnyEvent]:
            self.step = command.step
            self._relays.publish(command.version)
            return (HandedOver(command.id, command.version, self._shape.publish_s),)

        self._after(self._shape.publish_s, hand_over)

    def save(self, command: SaveCheckpoint) -> None:
        self._after(CHECKPOINT_S, lambda: (CheckpointSaved(command.id, command.step),))

    def _after(self, seconds: float, finish: Callable[[], Iterable[AnyEvent]]) -> None:
        self._clock.at(self._clock.now + seconds, lambda: finish() if self.alive else ())
