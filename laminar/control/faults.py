"""Notices what is silent or late, and makes losses good: replicas, relays, commands without an outcome."""

from collections.abc import Iterator
from typing import assert_never

from laminar.config import Config
from laminar.control import broadcast, fetch, scoring
from laminar.control.manager import make_homeless
from laminar.control.messages import (
    AnyCommand,
    CommandId,
    EndRun,
    MachineId,
    RelayFailedToStart,
    ReplicaFailedToStart,
    ReplicaId,
    StartRelay,
    StartReplica,
    StartTrainer,
    StopReplica,
)
from laminar.control.relay_state import Sender
from laminar.control.state import Awaited, ClusterState, Replica, TrainerPhase
from laminar.control.trajectory_state import TrajectoryState

NUM_FAILED_SAVES_MAX = 3
"""Checkpoints that may fail one after the other before the run ends: a full disk does not empty itself."""
NUM_TRAINER_LOSSES_MAX = 3
"""Losses of the trainer without a step done in between, until the run ends: what fails so often fails again."""
OF_TRAINER = (Awaited.MINI_BATCH, Awaited.HAND_OVER, Awaited.CHECKPOINT)
"""What nobody answers any more when the trainer is lost."""


def check_deadlines(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    """At every tick. If the controller itself stalled, nobody else is to blame: all deadlines start again."""
    gap_s = 0.0 if state.ticked_at_s is None else now - state.ticked_at_s
    stalled = gap_s > config.faults.report_deadline_s / 2
    state.ticked_at_s = now
    if gap_s > broadcast.STALL_S / 2:
        broadcast.restart_clocks(state, now)
    if stalled:
        state.counters.num_controller_stalls += 1
        _restart_deadlines(state, now)
        return
    for replica in tuple(state.replicas.values()):
        limit_s = config.faults.report_deadline_s if replica.started else config.faults.start_deadline_s
        if now - replica.heard_at_s > limit_s:
            doing = "reported nothing" if replica.started else "did not start"
            yield from lose_replica(state, config, replica.id, f"{doing} for {limit_s:g} s", now)
    yield from _check_relays(state, config, now)
    yield from broadcast.pass_by_stalled(state, now)
    limit_s = config.faults.start_deadline_s
    if state.trainer.phase is TrainerPhase.STARTING and now - state.trainer.ordered_at_s > limit_s:
        yield from lose_trainer(state, config, f"did not start for {limit_s:g} s", now)
    for id, pending in tuple(state.pending.items()):
        if id in state.pending and now - pending.sent_at_s > pending.deadline_s:
            cause = f"no outcome of {pending.awaited} within {pending.deadline_s:g} s"
            yield from fail_command(state, config, id, cause, now)


def start_replica(state: ClusterState, machine: MachineId, now: float) -> StartReplica:
    id = ReplicaId(state.next_replica)
    state.next_replica += 1
    state.replicas[id] = Replica(id, machine, heard_at_s=now)
    return StartReplica(state.new_command(), id, machine)


def lose_replica(state: ClusterState, config: Config, id: ReplicaId, cause: str, now: float) -> Iterator[AnyCommand]:
    """Its trajectories become homeless, a replacement starts; without either possible, the run ends by name."""
    replica = state.replicas.get(id)
    if replica is None:
        state.counters.num_late_messages += 1
        return
    state.counters.num_replicas_lost += 1
    rescued = list(replica.trajectories)
    make_homeless(state, rescued)
    state.counters.num_trajectories_rescued += len(rescued)
    for inbound in tuple(replica.inbound):
        state.trajectories[inbound].target = None
    del state.replicas[id]
    state.index.remove(id)
    for command in [c for c, p in state.pending.items() if p.replica == id]:
        del state.pending[command]
    yield StopReplica(state.new_command(), id, cause)
    if _may_replace(state, config):
        yield start_replica(state, replica.machine, now)
    elif not state.replicas:
        yield end(state, failed=True, cause=f"no replica is left: replica {id}: {cause}, and {_limit(config)}")


def fail_start(
    state: ClusterState, config: Config, event: ReplicaFailedToStart | RelayFailedToStart, now: float
) -> Iterator[AnyCommand]:
    """Before anything worked, the same would fail again: the run ends by name. Later it is a loss like any other."""
    if all(replica.version is None for replica in state.replicas.values()):
        kind = f"replica {event.replica}" if isinstance(event, ReplicaFailedToStart) else "a relay"
        yield end(state, failed=True, cause=f"{kind} did not start: {event.cause}")
    elif isinstance(event, ReplicaFailedToStart):
        yield from lose_replica(state, config, event.replica, event.cause, now)
    else:
        yield from lose_relay(state, config, event.machine, event.cause, now)


def lose_relay(state: ClusterState, config: Config, machine: MachineId, cause: str, now: float) -> Iterator[AnyCommand]:
    """The chain goes on without it, and another comes up; where none may, its replicas keep the weights they have."""
    if machine not in state.relays:
        state.counters.num_late_messages += 1
        return
    fetch.forget(state, machine)
    yield broadcast.leave(state, machine, now)
    if _may_replace(state, config):
        yield StartRelay(state.new_command(), machine, cause)
        return
    del state.relays[machine]
    if not state.relays:
        yield end(
            state, failed=True, cause=f"no relay is left: that of machine {machine}: {cause}, and {_limit(config)}"
        )


def lose_trainer(state: ClusterState, config: Config, cause: str, now: float) -> Iterator[AnyCommand]:
    """It comes up again from its newest complete checkpoint, while replicas go on; or the run ends by name.

    At its first start, or while the run is to stop, nobody would gain by that.
    """
    trainer = state.trainer
    trainer.num_losses += 1
    state.counters.num_trainers_lost += 1
    never_worked = trainer.phase is TrainerPhase.STARTING and trainer.attempt == 0
    if never_worked or state.stopping is not None or trainer.num_losses > NUM_TRAINER_LOSSES_MAX:
        yield end(state, failed=True, cause=f"the trainer was lost: {cause}")
    elif not _may_replace(state, config):
        yield end(state, failed=True, cause=f"the trainer was lost: {cause}, and {_limit(config)}")
    else:
        for command in [c for c, pending in state.pending.items() if pending.awaited in OF_TRAINER]:
            del state.pending[command]
        trainer.phase = TrainerPhase.STARTING
        trainer.attempt += 1
        trainer.ordered_at_s = now
        trainer.sender = Sender()
        broadcast.note_progress(state, now)
        yield StartTrainer(state.new_command(), trainer.attempt, cause)


def fail_command(state: ClusterState, config: Config, id: CommandId, cause: str, now: float) -> Iterator[AnyCommand]:
    """A command raised, or its outcome did not come in time."""
    pending = state.pending.pop(id, None)
    if pending is None:
        state.counters.num_late_messages += 1
        return
    match pending.awaited:
        case Awaited.LOAD | Awaited.RELEASE:
            assert pending.replica is not None, f"{pending} names no replica"
            yield from lose_replica(state, config, pending.replica, cause, now)
        case Awaited.SCORES:
            state.num_scores_awaited -= len(pending.trajectories)
            late = [t for id in pending.trajectories if (t := state.trajectories.get(id)) is not None]
            waiting = [t for t in late if t.state is TrajectoryState.FINISHED]
            yield from scoring.fail(state, config, [(t, f"reward_lost: {cause}") for t in waiting], now)
        case Awaited.CHECKPOINT:
            # The previous checkpoint is intact, and what was trained since stays in the buffer's memory.
            trainer = state.trainer
            state.counters.num_checkpoints_failed += 1
            trainer.num_failed_saves += 1
            if trainer.phase is TrainerPhase.SAVING:
                trainer.phase = TrainerPhase.WAITING
            was_last = state.stopping is not None and trainer.saving_step == trainer.step
            if was_last or trainer.num_failed_saves > NUM_FAILED_SAVES_MAX:
                yield end(state, failed=True, cause=f"the checkpoint of step {trainer.saving_step} failed: {cause}")
        case Awaited.FETCH:
            fetch.fail(state, now)
        case Awaited.MINI_BATCH | Awaited.HAND_OVER:
            yield from lose_trainer(state, config, f"{pending.awaited}: {cause}", now)
        case _:
            assert_never(pending.awaited)


def end(state: ClusterState, *, failed: bool, cause: str) -> EndRun:
    state.ended = True
    return EndRun(state.new_command(), failed, cause)


def _check_relays(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    for machine, relay in tuple(state.relays.items()):
        limit_s = config.faults.report_deadline_s if relay.started else config.faults.start_deadline_s
        if now - relay.heard_at_s > limit_s:
            yield from lose_relay(state, config, machine, f"reported nothing for {limit_s:g} s", now)
    limit_s = config.relay.publish_deadline_s
    for machine in sorted(state.relays):
        behind_since_s = state.relays[machine].behind_since_s
        if behind_since_s is not None and now - behind_since_s > limit_s:
            # Those further down the chain may only be waiting for this one: they get the same time again.
            for relay in state.relays.values():
                relay.behind_since_s = None if relay.behind_since_s is None else now
            yield from lose_relay(state, config, machine, f"no version became complete for {limit_s:g} s", now)
            return


def _restart_deadlines(state: ClusterState, now: float) -> None:
    if state.trainer.phase is TrainerPhase.STARTING:
        state.trainer.ordered_at_s = now
    for replica in state.replicas.values():
        replica.heard_at_s = now
    for relay in state.relays.values():
        relay.heard_at_s = now
        relay.behind_since_s = None if relay.behind_since_s is None else now
    for pending in state.pending.values():
        pending.sent_at_s = now


def _may_replace(state: ClusterState, config: Config) -> bool:
    """Whether one more process may be started for a lost one; counts it."""
    if state.counters.num_replacements >= config.faults.num_replacements_max:
        return False
    state.counters.num_replacements += 1
    return True


def _limit(config: Config) -> str:
    return f"faults.num_replacements_max={config.faults.num_replacements_max} replacements were used up"
