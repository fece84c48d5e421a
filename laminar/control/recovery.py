"""Takes a state back to a checkpoint: in a run whose trainer was lost, or in one that a new start goes on with.

The trainer is back at its newest checkpoint, and what was trained since returns to the buffer. After an end of the
whole run, replicas, relays and the weights in them are gone too: finished responses keep their scores, unfinished ones
begin again, since no relay holds the version that they came from.
"""

from laminar.control import groups, staleness
from laminar.control.index import Index
from laminar.control.state import ClusterState, Trainer
from laminar.control.trajectory_state import UNFINISHED, TrajectoryState


def recover(state: ClusterState, *, step: int) -> None:
    """`step`: what the checkpoint that the trainer restarts from covers; 0 without one."""
    roll_back(state, step)
    _give_up_evaluations(state)
    state.homeless.clear()
    for trajectory in state.trajectories.values():
        trajectory.replica = trajectory.target = None
        if trajectory.state in UNFINISHED:
            groups.restart(state, trajectory)
            state.homeless[trajectory.id] = None
    version = max(state.trainer.version, state.trainer.version_ordered)
    state.replicas.clear()
    state.index = Index()
    state.relays.clear()
    state.chain = []
    state.pending.clear()
    state.num_scores_awaited = 0
    state.retained = ()
    state.fetch_again_at_s = 0.0
    state.trainer = Trainer(step=step, version=version, version_ordered=version, saving_step=step, saved_step=step)
    state.counters.num_replacements = 0
    state.stopping = None
    state.ended = False
    state.ticked_at_s = None


def roll_back(state: ClusterState, step: int) -> None:
    """The trainer is back at `step`: what it trained since is to be trained again, and measured again.

    A held-out measurement of a later step that still goes on stays: when that step is done again, it has been measured.
    """
    _return_to_buffer(state, step)
    state.evaluations = [e for e in state.evaluations if not e.ended or e.step <= step]


def _return_to_buffer(state: ClusterState, step: int) -> None:
    """Groups trained after the checkpoint, and those in training, come first again, in the order they had."""
    kept = [id for id in state.trained if (state.groups[id].trained_step or 0) <= step]
    again = [*state.trained[len(kept) :], *state.trainer.groups]
    for id in again:
        group = state.groups[id]
        state.num_groups_outstanding += group.trained_step is not None
        for trajectory in group.trajectories:
            state.trajectories[trajectory].state = TrajectoryState.BUFFERED
            staleness.forget_trained(state, group, state.trajectories[trajectory])
        group.trained_step = group.trained_at_version = None
    state.counters.num_groups_trained -= len(state.trained) - len(kept)
    state.trained = kept
    state.trainer.groups, state.trainer.has_whole_step, state.trainer.index = [], False, 0
    state.buffer = [*again, *state.buffer]


def _give_up_evaluations(state: ClusterState) -> None:
    """The version that an unfinished evaluation was pinned to is gone; it is asked for anew."""
    for evaluation in state.evaluations:
        for id in evaluation.groups:
            for trajectory in state.groups.pop(id).trajectories:
                del state.trajectories[trajectory]
                dropped = state.evaluation_ledger.dropped
                dropped["version_gone"] = dropped.get("version_gone", 0) + 1
    state.evaluations = [e for e in state.evaluations if e.ended]
