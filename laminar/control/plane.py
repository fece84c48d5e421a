"""Decides: every event goes in here, and the commands that follow from it come out.

    event ──► take in (the state now knows it) ──► go on (whatever the new state allows) ──► commands

Pure: the same events at the same times always give the same commands, so a log replays and a simulator can drive it.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

from laminar.config import Config
from laminar.control import broadcast, costs, evaluation, faults, fetch, groups, repack, scoring, training
from laminar.control.manager import Manager, make_homeless, resume, settle
from laminar.control.messages import (
    AnyCommand,
    AnyEvent,
    CheckpointCopied,
    CheckpointSaved,
    CommandFailed,
    CommandId,
    EndRun,
    Failed,
    Finished,
    HandedOver,
    Loaded,
    LoadFailed,
    MachineId,
    MiniBatchTrained,
    Progress,
    RelayFailedToStart,
    RelayLost,
    RelayReport,
    RelayStarted,
    Released,
    ReplicaFailedToStart,
    ReplicaId,
    ReplicaLost,
    ReplicaReport,
    ReplicaStarted,
    RunStarted,
    Scored,
    SenderReport,
    ServiceFailedToStart,
    StopRequested,
    Tick,
    TrainerLost,
    TrainerStarted,
    VersionComplete,
    VersionEvicted,
)
from laminar.control.prompts import PromptOrder
from laminar.control.schedules.schedule import build_schedule
from laminar.control.state import ClusterState, Relay, TrainerPhase
from laminar.control.trajectory_state import Trajectory, TrajectoryState


class ControlPlane:
    """Holds the state, and routes each event to the rules that it concerns."""

    def __init__(
        self, config: Config, *, num_prompts: int, num_evaluation_prompts: int, state: ClusterState | None = None
    ) -> None:
        self.config = config
        self.state = state if state is not None else ClusterState()
        self._schedule = build_schedule(config)
        self._order = PromptOrder(config, num_prompts)
        self._manager = Manager(config, self._schedule, self._order, num_evaluation_prompts)

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take in one event; return what to start, in order. Never waits, never reads a clock."""
        if self.state.ended:
            return []
        commands = list(self._take_in(event, now))
        if not self.state.ended:
            commands += self._go_on(now)
        return _up_to_the_end(commands) if self.state.ended else commands

    # --------------------------------------------------------------------------------------------------- take in

    def _take_in(self, event: AnyEvent, now: float) -> Iterator[AnyCommand]:
        state, config = self.state, self.config
        match event:
            case RunStarted():
                yield from self._start(event, now)
            case Tick():
                yield from faults.check_deadlines(state, config, now)
                if now - state.checked_at_s >= config.repack.check_interval_s:
                    repack.check(state, config, now)
                    yield from self._repack(now)
            case ReplicaStarted():
                self._take_in_replica(event, now)
            case ReplicaReport():
                yield from self._take_in_report(event, now)
            case Released():
                yield from self._take_in_released(event, now)
            case Loaded():
                self._take_in_loaded(event, now)
            case LoadFailed():
                yield from self._take_in_failed_load(event, now)
            case ReplicaLost():
                yield from faults.lose_replica(state, config, event.replica, event.cause, now)
            case ReplicaFailedToStart():
                yield from faults.fail_start(state, config, event, now)
            case Scored():
                yield from scoring.take_in(state, config, event, now)
            case TrainerStarted():
                if self._is_trainer(event.attempt, TrainerPhase.STARTING):
                    yield from self._take_in_trainer(event, now)
            case MiniBatchTrained():
                if self._was_pending(event.command):
                    yield from training.take_in_trained(state, config, now)
            case HandedOver():
                if self._was_pending(event.command):
                    yield from training.take_in_hand_over(state, config, event, now)
                    broadcast.note_progress(state, now)
                    evaluation.request(state, config)
                    yield from self._repack(now)
            case CheckpointCopied():
                training.take_in_copied(state, event)
            case CheckpointSaved():
                if self._was_pending(event.command):
                    yield from training.take_in_checkpoint(state, event)
            case TrainerLost():
                if self._is_trainer(event.attempt):
                    yield from faults.lose_trainer(state, config, event.cause, now)
            case ServiceFailedToStart():
                yield faults.end(state, failed=True, cause=event.cause)
            case RelayStarted():
                yield from broadcast.take_in_start(state, event.machine, now)
            case RelayReport():
                broadcast.take_in_report(state, event, now)
            case SenderReport():
                broadcast.take_in_sender_report(state, event, now)
            case VersionComplete():
                broadcast.take_in_complete(state, event, now)
            case VersionEvicted():
                self._drop_version(event.machine, event.version)
            case RelayFailedToStart():
                yield from faults.fail_start(state, config, event, now)
            case RelayLost():
                yield from faults.lose_relay(state, config, event.machine, event.cause, now)
            case CommandFailed():
                yield from faults.fail_command(state, config, event.command, event.cause, now)
            case StopRequested():
                state.stopping = event.cause
                if state.trainer.phase is TrainerPhase.STARTING:
                    yield faults.end(state, failed=True, cause=event.cause)
            case _:
                assert_never(event)

    def _start(self, event: RunStarted, now: float) -> Iterator[AnyCommand]:
        """Bring up the replicas; relays and trainer come up by themselves."""
        self.state.started_at_s = self.state.trainer.ordered_at_s = now
        for machine in event.machines:
            self.state.relays[machine] = Relay(machine, heard_at_s=now)
        for machine, num_replicas in event.machines.items():
            for _ in range(num_replicas):
                yield faults.start_replica(self.state, machine, now)
        # After a resume some responses are whole and were not scored yet.
        unscored = [t for t in self.state.trajectories.values() if t.state is TrajectoryState.FINISHED]
        yield from scoring.ask(self.state, self.config, unscored, now)

    def _take_in_replica(self, event: ReplicaStarted, now: float) -> None:
        replica = self.state.replicas.get(event.replica)
        if replica is None or replica.started:
            self.state.counters.num_late_messages += 1
            return
        replica.started, replica.heard_at_s = True, now
        self.state.index.update(replica)
        replica.kv_capacity_tokens = event.kv_capacity_tokens
        replica.decode_cost = event.decode_cost
        replica.decode_batch_max = self.config.repack.decode_batch_max or costs.decode_batch_max(
            event.decode_cost,
            tolerance=self.config.repack.decode_latency_tolerance,
            context_tokens=self.config.data.response_tokens_max // 2,
        )

    def _take_in_report(self, event: ReplicaReport, now: float) -> Iterator[AnyCommand]:
        replica = self.state.replicas.get(event.replica)
        if replica is None:
            self.state.counters.num_late_messages += 1
            return
        replica.heard_at_s = now
        replica.kv_utilization = event.kv_utilization
        replica.num_running, replica.num_waiting = event.num_running, event.num_waiting
        replica.num_preemptions = event.num_preemptions
        replica.num_waiting_without_kv = event.num_waiting_without_kv
        self._take_in_progress(event)
        finished: list[Trajectory] = []
        for outcome in event.finished:
            if trajectory := self._current(outcome, event.replica):
                groups.finish(self.state, trajectory, outcome.num_tokens, truncated=outcome.truncated)
                finished.append(trajectory)
        for failure in event.failed:
            if trajectory := self._current(failure, event.replica):
                yield from groups.fail(self.state, self.config, trajectory, failure.cause)
        yield from scoring.ask(self.state, self.config, finished, now)

    def _take_in_progress(self, event: ReplicaReport | Released) -> None:
        replica = event.replica
        for progress in event.progress:
            trajectory = self._current(progress, replica)
            # A repeated report may be behind what is known; an attempt's tokens only become more.
            if trajectory is not None and progress.num_tokens >= trajectory.num_tokens:
                trajectory.num_tokens = progress.num_tokens
                if trajectory.state is not TrajectoryState.MOVING:
                    trajectory.state = _state_of(progress)

    def _current(self, message: Progress | Finished | Failed, replica: ReplicaId) -> Trajectory | None:
        """The trajectory, if the message is about its present attempt on its present replica."""
        trajectory = self.state.trajectories.get(message.trajectory)
        # One that has finished is on no replica.
        if trajectory is None or trajectory.attempt != message.attempt or trajectory.replica != replica:
            self.state.counters.num_late_messages += 1
            return None
        return trajectory

    def _take_in_released(self, event: Released, now: float) -> Iterator[AnyCommand]:
        """The source let go: each moved trajectory goes on at its target, or looks for a home if that is gone."""
        state = self.state
        pending = state.pending.pop(event.command, None)
        source = state.replicas.get(event.replica)
        if pending is None or source is None:
            state.counters.num_late_messages += 1
            return
        source.heard_at_s, source.releasing = now, None
        state.index.update(source)
        self._take_in_progress(event)
        stopped = dict.fromkeys(p.trajectory for p in event.progress)
        moved: dict[ReplicaId, list[Trajectory]] = {}
        for trajectory in [state.trajectories[id] for id in pending.trajectories if id in source.trajectories]:
            target = state.replicas.get(trajectory.target) if trajectory.target is not None else None
            if trajectory.id not in stopped:
                groups.stay(state, trajectory)
            elif target is None:
                make_homeless(state, [trajectory.id])
            else:
                groups.leave_replica(state, trajectory)
                settle(state, trajectory, target)
                moved.setdefault(target.id, []).append(trajectory)
        for target_id, trajectories in moved.items():
            yield resume(state, state.replicas[target_id], trajectories)

    def _take_in_loaded(self, event: Loaded, now: float) -> None:
        replica = self.state.replicas.get(event.replica)
        if self.state.pending.pop(event.command, None) is None or replica is None:
            self.state.counters.num_late_messages += 1
            return
        replica.heard_at_s, replica.loading = now, None
        replica.version = event.version
        self.state.index.update(replica)
        self.state.counters.num_loads += 1
        # Under an interrupt; what they had before was reported before.
        for id in replica.trajectories:
            self.state.trajectories[id].sample_from(event.version)

    def _take_in_failed_load(self, event: LoadFailed, now: float) -> Iterator[AnyCommand]:
        """A relay that could not give the version does not have it, whatever was heard before."""
        replica = self.state.replicas.get(event.replica)
        if not event.serves_on or replica is None:
            yield from faults.fail_command(self.state, self.config, event.command, event.cause, now)
        elif self.state.pending.pop(event.command, None) is not None:
            replica.loading = None
            self.state.index.update(replica)
            self.state.counters.num_loads_failed += 1
            self._drop_version(replica.machine, event.version)

    def _drop_version(self, machine: MachineId, version: int) -> None:
        if (relay := self.state.relays.get(machine)) and version in relay.complete:
            relay.complete.remove(version)

    def _is_trainer(self, attempt: int, phase: TrainerPhase | None = None) -> bool:
        """Whether news is of the trainer that is there now, in this phase, not of one that was given up."""
        trainer = self.state.trainer
        if attempt != trainer.attempt or phase not in (None, trainer.phase):
            self.state.counters.num_late_messages += 1
            return False
        return True

    def _take_in_trainer(self, event: TrainerStarted, now: float) -> Iterator[AnyCommand]:
        saved_step = self.state.trainer.saved_step
        if event.step < saved_step:
            cause = (
                f"the trainer came up with step {event.step}, but step {saved_step} was saved: its checkpoint is gone"
            )
            yield faults.end(self.state, failed=True, cause=cause)
        else:
            yield from training.take_in_start(self.state, self.config, event, now)

    def _was_pending(self, command: CommandId) -> bool:
        if self.state.pending.pop(command, None) is None:
            self.state.counters.num_late_messages += 1
            return False
        return True

    def _repack(self, now: float) -> Iterator[AnyCommand]:
        if self._schedule.may_repack and self.config.repack.enabled and self.state.stopping is None:
            yield from repack.start_repack(self.state, self.config, now)

    # ----------------------------------------------------------------------------------------------------- go on

    def _go_on(self, now: float) -> Iterator[AnyCommand]:
        state, config = self.state, self.config
        more_will_come = self._manager.more_will_come(state)
        yield from training.go_on(state, config, self._schedule, now, more_will_come=more_will_come)
        evaluation.skip_lost(state)
        yield from self._manager.serve(state, now)
        yield from broadcast.retain(state)
        yield from fetch.order(state, config, now)
        if state.trainer.phase is TrainerPhase.WAITING and not state.trainer.groups:
            yield from self._end_if_done(now)

    def _end_if_done(self, now: float) -> Sequence[AnyCommand]:
        """The last things of a run: last checkpoint, last evaluation, end."""
        state, trainer = self.state, self.state.trainer
        no_data_left = self._order.num_left(state) == 0 and state.num_groups_outstanding == 0
        if state.stopping is None and not training.steps_done(state, self.config) and not no_data_left:
            return ()
        if trainer.saved_step < trainer.step:
            return () if training.is_saving(state) else (training.save(state, self.config, now),)
        if state.stopping is not None:
            return (faults.end(state, failed=True, cause=state.stopping),)
        evaluation.request_last(state, self.config)
        if all(e.ended for e in state.evaluations):
            return (self._end_of_work(),)
        return ()

    def _end_of_work(self) -> AnyCommand:
        """The end that was wanted, unless nothing came of it: data that was all dropped trains nobody."""
        state, dropped = self.state, self.state.ledger.dropped
        if state.counters.num_groups_trained == 0 and any(cause != "equal_rewards" for cause in dropped):
            commonest = max(dropped, key=lambda cause: dropped[cause])
            cause = f"nothing was trained: {sum(dropped.values())} trajectories were dropped, most for {commonest}"
            return faults.end(state, failed=True, cause=cause)
        done = training.steps_done(state, self.config)
        return faults.end(state, failed=False, cause="every step is done" if done else "end of data")


def _up_to_the_end(commands: list[AnyCommand]) -> list[AnyCommand]:
    """Once the run has ended nothing more is ordered, whatever else the same event would have led to."""
    last = next(position for position, command in enumerate(commands) if isinstance(command, EndRun))
    return commands[: last + 1]


def _state_of(progress: Progress) -> TrajectoryState:
    return TrajectoryState.WAITING_FOR_TOOL if progress.waiting_for_tool else TrajectoryState.DECODING
