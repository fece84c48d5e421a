"""Joins ids and payload: what a command names by id is fetched here, what a report carries is stored here."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from laminar.control.messages import (
    Assignment,
    Finished,
    GroupId,
    ReplicaReport,
    Scored,
    ScoreTrajectories,
    TrainMiniBatch,
    TrajectoryId,
)
from laminar.control.state import ClusterState
from laminar.data.experience_buffer import ExperienceBuffer
from laminar.data.journal import Journal
from laminar.data.partial_pool import PartialResponsePool
from laminar.data.prompt_pool import PromptPool
from laminar.data.records import Experience, KvParcel, Prompt, ScoringTask, Task, WorkerReport


class Payload:
    """The prompt, partial-response and experience pools, and the journal that makes them survive a crash.

    In the controller's process. Tokens are stored before the event that speaks of them is handled, so control never
    hears of tokens that the pools lack.
    """

    def __init__(self, journal: Path, prompts: PromptPool, heldout: PromptPool, seed: int) -> None:
        self._journal = Journal(journal)
        self._prompts = prompts
        self._heldout = heldout
        self._seed = seed
        self._partial = PartialResponsePool()
        self._experiences = ExperienceBuffer()
        self._finished: dict[TrajectoryId, Finished] = {}
        self._prompt_of: dict[TrajectoryId, Prompt] = {}
        self._kv: dict[TrajectoryId, KvParcel] = {}
        """Of released trajectories, until they are given to another replica."""

    def restore(self, state: ClusterState) -> None:
        """Take back from the journal what the state still speaks of; forget the rest."""
        restored = self._journal.restore()
        self._partial, self._finished = restored.partial, restored.finished
        self.forget([id for id in self._partial.trajectories() if id not in state.trajectories])
        for trajectory in state.trajectories.values():
            self._prompt_of[trajectory.id] = self._prompt(trajectory.prompt, evaluation=trajectory.evaluation)
            if trajectory.score is not None and not trajectory.evaluation:
                self._add_experience(trajectory.id, trajectory.group, trajectory.score)

    def store(self, report: WorkerReport) -> None:
        self._kv |= {parcel.trajectory: parcel for parcel in report.kv}
        if not isinstance(report.event, ReplicaReport):
            return
        taken_in = [delta for delta in report.tokens if self._partial.apply(delta)]
        finished = [mark for mark in report.event.finished if self._is_current(mark)]
        if taken_in or finished:
            self._journal.append(taken_in, finished)
        self._finished |= {mark.trajectory: mark for mark in finished}

    def tasks(self, assignments: Sequence[Assignment], *, evaluation: bool) -> list[Task]:
        """What a replica needs to start or go on: exactly the tokens that control counts."""
        tasks: list[Task] = []
        for a in assignments:
            prompt = self._prompt_of[a.trajectory] = self._prompt(a.prompt, evaluation=evaluation)
            self._partial.truncate_to(a.trajectory, a.num_tokens)
            response = self._partial.response(a.trajectory)
            seed = self._seed_of(a.trajectory)
            token_ids, loss_mask = tuple(response.token_ids), tuple(response.loss_mask)
            kv = self._kv.pop(a.trajectory, None)
            tasks.append(Task(a.trajectory, a.attempt, prompt, token_ids, loss_mask, seed, kv))
        return tasks

    def scoring_tasks(self, assignments: Sequence[Assignment], *, evaluation: bool) -> list[ScoringTask]:
        return [
            ScoringTask(
                a.trajectory,
                a.attempt,
                tuple(self._partial.response(a.trajectory).token_ids),
                self._prompt(a.prompt, evaluation=evaluation),
            )
            for a in assignments
        ]

    def store_scores(self, command: ScoreTrajectories, event: Scored) -> None:
        """Scored trajectories become experience; those of held-out prompts only give their score."""
        self._journal.append(scores=event.scores)
        if command.evaluation:
            return
        group_of = {a.trajectory: a.group for a in command.trajectories}
        for score in event.scores:
            # A second outcome of one response (the first came after its deadline) changes nothing.
            if score.trajectory in self._finished and score.trajectory not in self._experiences:
                self._add_experience(score.trajectory, group_of[score.trajectory], score.score)

    def experiences(self, command: TrainMiniBatch) -> list[Experience]:
        return self._experiences.take(command.trajectories)

    def forget(self, trajectories: Sequence[TrajectoryId]) -> None:
        self._journal.forget(trajectories)
        self._partial.forget(trajectories)
        self._experiences.forget(trajectories)
        for id in trajectories:
            self._finished.pop(id, None)
            self._prompt_of.pop(id, None)
            self._kv.pop(id, None)

    def close(self) -> None:
        self._journal.close()

    def _is_current(self, mark: Finished) -> bool:
        """Whether it is of no older an attempt than the tokens, and of a trajectory that is not forgotten."""
        return mark.trajectory in self._partial and mark.attempt >= self._partial.attempt(mark.trajectory)

    def _add_experience(self, id: TrajectoryId, group: GroupId, score: float) -> None:
        response = self._partial.response(id)
        truncated = self._finished[id].truncated
        self._experiences.add(id, self._prompt_of[id], response, score, min(response.versions), group, truncated)

    def _prompt(self, prompt: int, *, evaluation: bool) -> Prompt:
        return (self._heldout if evaluation else self._prompts)[prompt]  # pyright: ignore[reportArgumentType]

    def _seed_of(self, trajectory: TrajectoryId) -> int:
        """Depends on the run's seed and the trajectory alone, so a move does not change what is sampled."""
        digest = hashlib.blake2b(f"{self._seed}:{trajectory}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
