"""Never lets replicas stop: at a publish they interrupt, load, and go on with the same trajectories (AReaL).

A trajectory may have tokens of several versions. Its own version is its oldest one, and admission keeps the staleness
that follows from it within a bound.
"""

from collections.abc import Sequence

from laminar.config import Config
from laminar.control import evaluation
from laminar.control.messages import GroupId
from laminar.control.schedules.schedule import room_in_buffer
from laminar.control.state import ClusterState, Replica, TrainerPhase
from laminar.control.trajectory_state import Group


class PartialRollout:
    may_repack = False
    interrupts = True
    refresh_wait_max_s = 0.0

    def __init__(self, config: Config, staleness_max: int | None) -> None:
        self._config = config
        self._staleness_max = staleness_max

    def takers(self, state: ClusterState) -> Sequence[Replica]:
        """All that serve and have a place left, least loaded first; one empties itself if it is to evaluate.

        Trajectories that lost their replica come first: while any looks for a place nobody takes new groups.
        """
        if self._room(state, state.trainer.version) <= 0 or any(
            not state.trajectories[id].evaluation for id in state.homeless
        ):
            return ()
        # Most replicas are full, and this is asked after every event.
        num_held_max = (self._config.rollout.num_groups_per_replica_max - 1) * self._config.batch.group_size
        with_places = [r for r in state.replicas.values() if len(r.trajectories) <= num_held_max and _serves(r)]
        if not with_places:
            return ()
        draining = self._draining(state)
        takers = [r for r in with_places if r.empty or r is not draining]
        return sorted(takers, key=lambda r: (len(r.trajectories), r.id))

    def num_groups_wanted(self, state: ClusterState, replica: Replica, version: int, num_takers: int) -> int:
        """A fair share of the room, as far as it has places for it."""
        fair_share = -(-self._room(state, version) // num_takers)
        return max(0, min(fair_share, self._num_places(replica)))

    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        """A step's groups, those of the oldest versions first, unless what is left could then not keep the bound.

        That is so when too many old groups are still decoding: the step waits for them, instead of dropping them later.
        """
        step_size = self._config.batch.num_prompts_per_step
        if len(state.buffer) < step_size and not all_here:
            return ()
        oldest_first = sorted(state.buffer, key=lambda id: state.groups[id].version)
        chosen = oldest_first[:step_size]
        return chosen if all_here or self._rest_keeps_bound(state, chosen) else ()

    def _room(self, state: ClusterState, version: int) -> int:
        """Prompt groups of this version that may still be dispatched, by AReaL's rule and the buffer's capacity.

        The rule: floor((N - 1) / B) <= version + staleness_max, with N the groups dispatched so far and B those of a
        step. Of these, the ones that earlier steps took are (the version that the next step starts at) x B, so the
        rest has room for the steps from that version to version + staleness_max. Counted in this way the rule also
        holds where versions and steps went apart: after a resume, a smaller step, dropped groups.
        """
        room = room_in_buffer(state, self._config)
        if self._staleness_max is None:
            return room
        trainer = state.trainer
        next_version = trainer.version + (bool(trainer.groups) or trainer.phase is TrainerPhase.PUBLISHING)
        num_steps = version + self._staleness_max - next_version + 1
        num_ahead = state.num_groups_outstanding - len(trainer.groups)
        return min(room, num_steps * self._config.batch.num_prompts_per_step - num_ahead)

    def _rest_keeps_bound(self, state: ClusterState, chosen: Sequence[GroupId]) -> bool:
        """Whether the groups that this step leaves behind can all be trained in time, one step's worth a version.

        Where waiting cannot help, since everything older than what the step takes has come, they are let go on.
        """
        if self._staleness_max is None:
            return True
        taken = dict.fromkeys(chosen)
        left = [g for g in state.groups.values() if _outstanding(g) and g.id not in taken]
        newest_taken = max(state.groups[id].version for id in chosen)
        in_buffer = dict.fromkeys(state.buffer)
        if not any(g.id not in in_buffer and g.version < newest_taken for g in left):
            return True
        step_size = self._config.batch.num_prompts_per_step
        num_left_by_steps = sorted(g.version + self._staleness_max - state.trainer.version for g in left)
        return all(rank < num_steps * step_size for rank, num_steps in enumerate(num_left_by_steps))

    def _num_places(self, replica: Replica) -> int:
        """Prompt groups that it may hold beside what it has."""
        group_size = self._config.batch.group_size
        return self._config.rollout.num_groups_per_replica_max - -(-len(replica.trajectories) // group_size)

    def _draining(self, state: ClusterState) -> Replica | None:
        """Who takes no more groups, so that an evaluation gets a replica of its own: the least loaded that can."""
        version = _version_to_evaluate(state)
        if version is None:
            return None
        serving = (r for r in state.replicas.values() if _serves(r))
        able = [r for r in serving if r.version == version or version in state.versions_complete(r.machine)]
        return min(able, key=lambda r: (len(r.trajectories), r.id), default=None)


def _serves(replica: Replica) -> bool:
    return replica.started and replica.loading is None and not replica.evaluating


def _outstanding(group: Group) -> bool:
    return not group.evaluation and group.trained_at_version is None


def _version_to_evaluate(state: ClusterState) -> int | None:
    """That of the evaluation which looks for a replica, or whose replica was lost."""
    if due := evaluation.due(state):
        return due.version
    homeless = (state.trajectories[id] for id in state.homeless)
    return next((t.version for t in homeless if t.evaluation), None)
