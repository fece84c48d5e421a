"""Makes all replicas generate the step's batch, stop, and load (verl): staleness 0, and all wait for the tail."""

from laminar.config import Config
from laminar.control.schedules.schedule import room_in_buffer
from laminar.control.state import ClusterState, TrainerPhase


class Synchronous:
    may_repack = False
    newest_only = True

    def num_groups_wanted(self, state: ClusterState, config: Config, num_empty: int) -> int:
        """An equal share of what the step still lacks, however many are empty; nothing while the trainer works."""
        if state.trainer.phase is not TrainerPhase.WAITING:
            return 0
        step_size = config.batch.num_prompts_per_step
        lacking = min(step_size - state.num_groups_outstanding, room_in_buffer(state, config))
        num_serving = sum(not r.evaluating for r in state.replicas.values())
        return max(0, min(lacking, -(-step_size // max(1, num_serving))))
