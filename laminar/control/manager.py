"""Manages the replicas: which one gets which prompt groups, when it refreshes, where homeless trajectories go on."""

from collections.abc import Iterator

from laminar.config import Config
from laminar.control import evaluation, groups
from laminar.control.messages import AnyCommand, Generate, Load, ReplicaId, Resume, TrajectoryId
from laminar.control.prompts import PromptOrder
from laminar.control.schedules.schedule import Schedule
from laminar.control.state import Awaited, ClusterState, Replica, TrainerPhase
from laminar.control.trajectory_state import Trajectory, TrajectoryState


class Manager:
    """Decides for replicas; holds nothing but the rules and the prompt order (what it knows is in the state)."""

    def __init__(self, config: Config, schedule: Schedule, order: PromptOrder, num_evaluation_prompts: int) -> None:
        self._config = config
        self._schedule = schedule
        self._order = order
        self._num_evaluation_prompts = num_evaluation_prompts

    def serve(self, state: ClusterState, now: float) -> Iterator[AnyCommand]:
        """Start whatever the new state allows on the replicas."""
        if self._schedule.interrupts:
            yield from self._interrupt(state, now)
        if state.homeless:
            yield from self._house(state)
        if state.homeless or evaluation.due(state):
            versions = [version for version, _ in self._by_version(state)]
            for replica in state.empty_replicas():
                yield from self._serve_first(state, replica, versions, now)
        if state.stopping is not None or not self.more_will_come(state):
            return
        is_near = self._is_near(state, now)
        if is_near and state.trainer.phase is TrainerPhase.PUBLISHING:
            return
        takers = self._schedule.takers(state)
        for num_served, replica in enumerate(takers):
            version = self._version_for_batch(state, replica, is_near=is_near)
            if version is not None:
                yield from self._admit(state, replica, version, len(takers) - num_served, now)

    def more_will_come(self, state: ClusterState) -> bool:
        """Whether groups beyond those dispatched may still be dispatched."""
        return self._order.num_left(state) > 0 and not self._refill_exhausted(state)

    def _interrupt(self, state: ClusterState, now: float) -> Iterator[AnyCommand]:
        """Let each replica that decodes take the newest weights of its machine; held-out ones stay at theirs."""
        for replica in state.replicas.values():
            if not replica.trajectories or replica.evaluating or replica.loading is not None:
                continue
            newest = state.newest_complete(replica.machine)
            assert replica.version is not None, f"{replica} decodes without weights"
            if newest is not None and newest > replica.version:
                state.counters.num_interrupts += 1
                yield self._load(state, replica, newest, now, interrupt=True)

    # ------------------------------------------------------------------------------------- homeless trajectories

    def _house(self, state: ClusterState) -> Iterator[AnyCommand]:
        """Resume each on the least loaded replica of its own version; restart those whose version is gone.

        Those that need no version are spread over the replicas of the newest: none takes more than its share of them.
        """
        chosen: dict[ReplicaId, list[Trajectory]] = {}
        for (version, is_evaluation), ids in self._by_version(state).items():
            if version is not None and not self._version_survives(state, version):
                yield from self._give_up_version(state, ids)
                continue
            homes = self._homes_for(state, version, evaluation=is_evaluation)
            num_held_max = self._num_restarted_max(state) if version is None else None
            for id in ids:
                home = min(homes, key=lambda r: (len(r.trajectories), r.id), default=None)
                if home is None or (num_held_max is not None and len(home.trajectories) >= num_held_max):
                    break
                settle(state, state.trajectories[id], home)
                chosen.setdefault(home.id, []).append(state.trajectories[id])
        for home_id, trajectories in chosen.items():
            yield resume(state, state.replicas[home_id], trajectories)

    def _by_version(self, state: ClusterState) -> dict[tuple[int | None, bool], list[TrajectoryId]]:
        """Homeless trajectories by the version they need (none: the newest) and whether they are held-out ones."""
        found: dict[tuple[int | None, bool], list[TrajectoryId]] = {}
        for trajectory in (state.trajectories[id] for id in state.homeless):
            any_version = self._schedule.interrupts and not trajectory.evaluation
            needed = None if any_version else trajectory.version
            found.setdefault((needed, trajectory.evaluation), []).append(trajectory.id)
        return found

    def _give_up_version(self, state: ClusterState, ids: list[TrajectoryId]) -> Iterator[AnyCommand]:
        """No relay and no replica holds it any more: a held-out measurement of it ends, the others start again."""
        for trajectory in [state.trajectories[id] for id in ids]:
            if trajectory.evaluation:
                yield from groups.drop(state, self._config, trajectory, "version_gone")
            else:
                groups.restart(state, trajectory)

    def _homes_for(self, state: ClusterState, version: int | None, *, evaluation: bool) -> list[Replica]:
        """Replicas that serve this version (none: the newest one) and may take more."""
        wanted = state.trainer.version if version is None else version
        return [
            r
            for r in state.replicas.values()
            if r.started
            and r.loading is None
            and r.releasing is None
            and r.version == wanted
            and (r.evaluating == evaluation or r.empty)
        ]

    def _num_restarted_max(self, state: ClusterState) -> int:
        """Trajectories that a replica may hold and still take ones without version: a batch, or an equal share."""
        batch = self._config.rollout.num_groups_per_replica_max * self._config.batch.group_size
        serving = [r for r in state.replicas.values() if not r.evaluating]
        num_unfinished = len(state.homeless) + sum(len(r.trajectories) for r in serving)
        return min(batch, -(-num_unfinished // max(1, len(serving))) + self._config.batch.group_size)

    def _version_survives(self, state: ClusterState, version: int) -> bool:
        """Whether it is somewhere, or on its way: the newest comes to every relay, however often the chain breaks."""
        if version == state.trainer.version or self._is_loading(state, version):
            return True
        on_relay = any(version in relay.complete for relay in state.relays.values())
        return on_relay or any(r.version == version for r in state.replicas.values())

    # ------------------------------------------------------------------------------------------- empty replicas

    def _serve_first(
        self, state: ClusterState, replica: Replica, versions: list[int | None], now: float
    ) -> Iterator[AnyCommand]:
        """What comes before new prompt groups: trajectories without a home (they need `versions`), evaluations."""
        if (version := self._version_awaited_here(state, replica, versions)) is not None:
            yield self._load(state, replica, version, now)
        elif (due := evaluation.due(state)) and self._may_evaluate(state, replica, due.version):
            if replica.version == due.version:
                yield from evaluation.start(state, self._config, due, replica, self._num_evaluation_prompts, now)
            else:
                yield self._load(state, replica, due.version, now)

    def _admit(
        self, state: ClusterState, replica: Replica, version: int, num_takers: int, now: float
    ) -> Iterator[AnyCommand]:
        """Give it new prompt groups, or first the weights that they are to be sampled from."""
        wanted = self._schedule.num_groups_wanted(state, replica, version, num_takers)
        num_groups = min(wanted, self._order.num_left(state))
        if num_groups > 0 and version == replica.version:
            yield self._generate(state, replica, num_groups, now)
        elif num_groups > 0:
            state.counters.num_refreshes += replica.version is not None
            yield self._load(state, replica, version, now)

    def _version_awaited_here(self, state: ClusterState, replica: Replica, versions: list[int | None]) -> int | None:
        """The version of the oldest homeless trajectory that this replica could load, unless one is loading it.

        The newest one, for those that start again, any number of replicas may load.
        """
        available = state.versions_complete(replica.machine) if versions else ()
        for version in versions:
            wanted = state.trainer.version if version is None else version
            is_free = version is None or not self._is_loading(state, wanted)
            if wanted != replica.version and wanted in available and is_free:
                return wanted
        return None

    def _may_evaluate(self, state: ClusterState, replica: Replica, version: int) -> bool:
        """The replica has the version, or can load it and no other is doing so."""
        if replica.version == version:
            return True
        return version in state.versions_complete(replica.machine) and not self._is_loading(state, version)

    def _is_loading(self, state: ClusterState, version: int) -> bool:
        return any(
            p.awaited is Awaited.LOAD and p.version == version and p.replica in state.replicas
            for p in state.pending.values()
        )

    def _refill_exhausted(self, state: ClusterState) -> bool:
        """Whether the filter has dropped so many groups since the last step that no more are admitted for it."""
        batch, factor = self._config.batch, self._config.buffer.max_refill_factor
        return state.num_groups_refilled >= (factor - 1) * batch.num_prompts_per_step and state.num_groups_refilled > 0

    def _version_for_batch(self, state: ClusterState, replica: Replica, *, is_near: bool) -> int | None:
        """The version to start the next batch at; none: there is none yet, or one is on its way and is near."""
        newest, held = state.newest_complete(replica.machine), replica.version
        if newest is None or (held is not None and held > newest):
            newest = held
        is_coming = newest is None or newest < state.trainer.version
        return None if is_coming and is_near else newest

    def _is_near(self, state: ClusterState, now: float) -> bool:
        """Whether a version that is on its way is expected soon enough to be waited for."""
        wait_max_s = self._schedule.refresh_wait_max_s
        return state.trainer.broadcast_s <= wait_max_s and now < state.trainer.published_at_s + wait_max_s

    def _load(
        self, state: ClusterState, replica: Replica, version: int, now: float, *, interrupt: bool = False
    ) -> Load:
        replica.loading = state.expect(
            Awaited.LOAD, now, self._config.faults.load_deadline_s, replica=replica.id, version=version
        )
        state.index.update(replica)
        return Load(replica.loading, replica.id, version, interrupt)

    def _generate(self, state: ClusterState, replica: Replica, num_groups: int, now: float) -> Generate:
        assert replica.version is not None, f"{replica} would generate without weights"
        replica.kv_utilization_at_check = 0.0
        replica.in_tail = False
        assignments = [
            assignment
            for _ in range(num_groups)
            for assignment in groups.dispatch(
                state, self._order.take(state), self._config.batch.group_size, replica, now, evaluation=False
            )[1]
        ]
        return Generate(state.new_command(), replica.id, replica.version, tuple(assignments))


def settle(state: ClusterState, trajectory: Trajectory, home: Replica) -> None:
    """It lives here from now on, under a new attempt number, so that reports from its former home are late."""
    state.homeless.pop(trajectory.id, None)
    home.trajectories[trajectory.id] = None
    home.evaluating = trajectory.evaluation
    state.index.update(home)
    trajectory.replica, trajectory.target = home.id, None
    assert home.version is not None, f"{home} would go on without weights"
    trajectory.sample_from(home.version)
    trajectory.attempt += 1
    trajectory.state = TrajectoryState.QUEUED
    _note_version(state, trajectory)


def _note_version(state: ClusterState, trajectory: Trajectory) -> None:
    """Only a member that had to restart can come from another version than the rest of its group."""
    group = state.groups[trajectory.group]
    versions = [v for id in group.trajectories if (v := state.trajectories[id].version) is not None]
    group.version = min(versions)
    if not group.mixed and group.version != max(versions):
        group.mixed = True
        state.counters.num_groups_mixed += 1


def resume(state: ClusterState, home: Replica, trajectories: list[Trajectory]) -> Resume:
    assert home.version is not None, f"{home} would resume without weights"
    assignments = tuple(groups.assignment(t) for t in trajectories)
    return Resume(state.new_command(), home.id, home.version, assignments, trajectories[0].evaluation)


def make_homeless(state: ClusterState, ids: list[TrajectoryId]) -> None:
    """They lost their replica; their tokens are in the partial-response pool."""
    for id in ids:
        trajectory = state.trajectories[id]
        groups.leave_replica(state, trajectory)
        trajectory.state = TrajectoryState.MOVING if trajectory.num_tokens else TrajectoryState.QUEUED
        state.homeless[id] = None
