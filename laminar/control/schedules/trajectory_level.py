"""Lets each replica take the newest weights when its own batch ends (Laminar): nobody waits for anybody."""

from laminar.config import Config
from laminar.control.schedules.schedule import room_in_buffer
from laminar.control.state import ClusterState, Replica


class TrajectoryLevel:
    may_repack = True
    newest_only = False

    def num_groups_wanted(self, state: ClusterState, config: Config, replica: Replica) -> int:
        """A fair share of the room among the replicas that could take work now."""
        room = room_in_buffer(state, config)
        num_empty = sum(r.empty for r in state.replicas.values())
        fair_share = -(-room // max(1, num_empty))
        return min(config.rollout.num_groups_per_replica_max, fair_share)
