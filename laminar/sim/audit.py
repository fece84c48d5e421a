"""Keeps books of a run from outside, from its events and commands alone, and says which promise a command breaks.

`ClusterState.check()` compares what control believes with itself; here it is compared with what control was told.
"""

from collections.abc import Sequence

import msgspec

from laminar.config import Config
from laminar.control import messages as m
from laminar.control.schedules.schedule import build_schedule
from laminar.control.state import ClusterState


class Member(msgspec.Struct):
    """A trajectory, as the messages tell of it. num_tokens: heard of under this attempt, or begun with.

    version: that of its newest assignment.
    """

    group: m.GroupId
    attempt: int
    version: int
    num_tokens: int = 0
    has_finished: bool = False
    has_score: bool = False
    trained_step: int | None = None


class Audit:
    """Called after every event with what control made of it. Raises AssertionError, naming the law and the place."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mixes_versions = build_schedule(config).interrupts
        self._members: dict[m.TrajectoryId, Member] = {}
        self._group_of: dict[m.PromptId, m.GroupId] = {}
        """Of training prompts."""
        self._lost: set[m.ReplicaId] = set()
        self._trainer_attempt = -1
        self._begun = (0, config.batch.num_mini_batches - 1)
        """The newest mini-batch ordered: step, index."""

    def __call__(self, event: m.AnyEvent, commands: Sequence[m.AnyCommand], state: ClusterState) -> None:
        self._hear(event)
        for command in commands:
            self._obey(command)
        state.check()

    # ------------------------------------------------------------------------------------------- what control hears

    def _hear(self, event: m.AnyEvent) -> None:
        match event:
            case m.ReplicaReport() | m.Released() if event.replica in self._lost:
                pass  # Given up already: what it says last is late.
            case m.ReplicaReport():
                for progress in event.progress:
                    self._hear_progress(progress)
                for finished in event.finished:
                    if (member := self._of(finished)) is not None:
                        member.num_tokens, member.has_finished = finished.num_tokens, True
            case m.Released():
                for progress in event.progress:
                    self._hear_progress(progress)
            case m.Scored():
                for score in event.scores:
                    if (member := self._of(score)) is not None:
                        member.has_score = True
            case m.TrainerStarted() if event.attempt > self._trainer_attempt:
                self._trainer_attempt = event.attempt
                self._go_back_to(event.step)
            case _:
                pass

    def _of(self, told: m.Progress | m.Finished | m.Score) -> Member | None:
        """None: it is of an attempt that is over."""
        member = self._members.get(told.trajectory)
        return member if member is not None and member.attempt == told.attempt else None

    def _hear_progress(self, progress: m.Progress) -> None:
        if (member := self._of(progress)) is not None:
            member.num_tokens = max(member.num_tokens, progress.num_tokens)

    def _go_back_to(self, step: int) -> None:
        """A trainer came up from its checkpoint: what was trained after it is trained again."""
        self._begun = (step, self._config.batch.num_mini_batches - 1)
        for member in self._members.values():
            if member.trained_step is not None and member.trained_step > step:
                member.trained_step = None

    # ------------------------------------------------------------------------------------------ what control orders

    def _obey(self, command: m.AnyCommand) -> None:
        match command:
            case m.StopReplica():
                self._lost.add(command.replica)
            case m.Generate() | m.Resume() | m.Load() | m.Release():
                assert command.replica not in self._lost, f"{command} is for a replica that is lost"
                if isinstance(command, m.Generate | m.Resume):
                    self._check_work(command)
            case m.TrainMiniBatch():
                self._check_mini_batch(command)
            case m.ScoreTrajectories():
                for assignment in command.trajectories:
                    assert self._members[assignment.trajectory].has_finished, f"{assignment} is scored unfinished"
            case m.Forget():
                for id in command.trajectories:
                    self._members.pop(id, None)
            case _:
                pass

    def _check_work(self, command: m.Generate | m.Resume) -> None:
        for assignment in command.trajectories:
            member = self._members.get(assignment.trajectory)
            if member is None:
                self._members[assignment.trajectory] = Member(assignment.group, assignment.attempt, command.version)
                assert assignment.num_tokens == 0, f"{assignment} begins in its middle"
            else:
                self._check_again(assignment, member, command)
            if not command.evaluation:
                group = self._group_of.setdefault(assignment.prompt, assignment.group)
                assert group == assignment.group, f"law 2: prompt {assignment.prompt} is in two groups"

    def _check_again(self, assignment: m.Assignment, member: Member, command: m.Generate | m.Resume) -> None:
        assert assignment.attempt > member.attempt, f"{assignment} has the number of an attempt before it"
        assert not member.has_finished, f"{assignment} is done again, and has finished"
        # Where the version is gone that it needs, it begins again.
        kept = member.num_tokens if command.version == member.version or self._mixes_versions else 0
        assert assignment.num_tokens == kept, f"law 1: {assignment} at {command.version}, heard of {member}"
        member.attempt, member.num_tokens, member.version = assignment.attempt, assignment.num_tokens, command.version

    def _check_mini_batch(self, command: m.TrainMiniBatch) -> None:
        batch = self._config.batch
        step, index = self._begun
        following = (step, index + 1) if index + 1 < batch.num_mini_batches else (step + 1, 0)
        ordered = (command.step, command.index)
        assert ordered == following, f"mini-batch {ordered} comes after {self._begun}"
        self._begun = following
        counts: dict[m.GroupId, int] = {}
        for id, group in zip(command.trajectories, command.groups, strict=True):
            member = self._members[id]
            assert member.group == group, f"trajectory {id} is trained in group {group}, not in {member.group}"
            assert member.has_finished, f"trajectory {id} is trained unfinished"
            assert member.has_score, f"trajectory {id} is trained without a score"
            assert member.trained_step is None, f"law 2: trajectory {id} is trained twice"
            member.trained_step = command.step
            counts[group] = counts.get(group, 0) + 1
        assert set(counts.values()) == {batch.group_size}, f"not all groups are whole, {counts}"
        assert len(counts) == batch.num_prompts_per_step // batch.num_mini_batches, f"{len(counts)} groups"
