"""Pretends to be the trainer: mini-batches by their tokens, the hand-over by the weights' bytes."""

from collections.abc import Callable, Iterable

from laminar.control.messages import (
    AnyEvent,
    CheckpointCopied,
    CheckpointSaved,
    HandedOver,
    MiniBatchTrained,
    Publish,
    SaveCheckpoint,
    StartTrainer,
    TrainerLost,
    TrainerStarted,
    TrainMiniBatch,
)
from laminar.sim.clock import Clock
from laminar.sim.relays import SimulatedRelays
from laminar.sim.shape import Shape
from laminar.sim.workload import Workload

COPY_S = 0.1
"""What saving holds the trainer up for."""
WRITE_S = 10.0
"""From there to a complete checkpoint, while it trains on."""


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
        self._attempt: int | None = 0
        """None: it is dead."""
        self._saved_step = 0
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
        def complete() -> Iterable[AnyEvent]:
            self._saved_step = command.step
            return (CheckpointSaved(command.id, command.step),)

        self._after(COPY_S, lambda: (CheckpointCopied(command.id, command.step),))
        self._after(COPY_S + WRITE_S, complete)

    def start(self, command: StartTrainer, seconds: float) -> None:
        """Once more, from the newest complete checkpoint."""
        self._attempt, self.step = command.attempt, self._saved_step
        self._after(seconds, lambda: (TrainerStarted(self._saved_step, command.attempt),))

    def kill(self) -> TrainerLost | None:
        """What it was doing is never heard of again. None: it was dead already."""
        attempt, self._attempt = self._attempt, None
        return None if attempt is None else TrainerLost("killed", attempt)

    def _after(self, seconds: float, finish: Callable[[], Iterable[AnyEvent]]) -> None:
        attempt = self._attempt
        self._clock.at(self._clock.now + seconds, lambda: finish() if self._attempt == attempt is not None else ())
