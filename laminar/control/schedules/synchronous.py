"""Makes all replicas generate the step's batch, stop, and load (verl): staleness 0, and all wait for the tail."""

import math
from collections.abc import Sequence

from laminar.config import Config
from laminar.control.messages import GroupId
from laminar.control.schedules.schedule import equal_share, num_groups_lacking, whole_step
from laminar.control.state import ClusterState, Replica, TrainerPhase


class Synchronous:
    may_repack = False
    interrupts = False
    refresh_wait_max_s = math.inf

    def __init__(self, config: Config) -> None:
        self._config = config

    def takers(self, state: ClusterState) -> Sequence[Replica]:
        """The empty ones, but none while the trainer works."""
        if state.trainer.phase is not TrainerPhase.WAITING or self._num_groups_lacking(state) <= 0:
            return ()
        return state.empty_replicas()

    def num_groups_wanted(self, state: ClusterState, replica: Replica, version: int, num_takers: int) -> int:
        return equal_share(state, self._config, self._num_groups_lacking(state))

    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        return whole_step(state, self._config, all_here=all_here)

    def _num_groups_lacking(self, state: ClusterState) -> int:
        return num_groups_lacking(state, self._config, 1)
