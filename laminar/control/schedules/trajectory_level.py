"""Lets each replica take the newest weights when its own batch ends (Laminar): nobody waits for anybody."""

from collections.abc import Sequence

from laminar.config import Config
from laminar.control.messages import GroupId
from laminar.control.schedules.schedule import room_in_buffer, whole_step
from laminar.control.state import ClusterState, Replica


class TrajectoryLevel:
    may_repack = True
    interrupts = False

    def __init__(self, config: Config) -> None:
        self.refresh_wait_max_s = config.relay.refresh_wait_max_s
        self._config = config

    def takers(self, state: ClusterState) -> Sequence[Replica]:
        return state.empty_replicas() if room_in_buffer(state, self._config) else ()

    def num_groups_wanted(self, state: ClusterState, replica: Replica, version: int, num_takers: int) -> int:
        """A fair share of the room among the replicas that could take work now."""
        fair_share = -(-room_in_buffer(state, self._config) // num_takers)
        return min(self._config.rollout.num_groups_per_replica_max, fair_share)

    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        return whole_step(state, self._config, all_here=all_here)
