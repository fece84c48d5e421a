"""Lets each replica take the newest weights when its own batch ends (Laminar): nobody waits for anybody."""

from laminar.config import Config
from laminar.control.schedules.schedule import room_in_buffer
from laminar.control.state import ClusterState


class TrajectoryLevel:
    may_repack = True
    newest_only = False

    def num_groups_wanted(self, state: ClusterState, config: Config, num_empty: int) -> int:
        """A fair share of the room among the replicas that could take work now."""
        fair_share = -(-room_in_buffer(state, config) // num_empty)
        return min(config.rollout.num_groups_per_replica_max, fair_share)
