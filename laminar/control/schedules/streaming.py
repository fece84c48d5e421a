"""Lets the trainer take mini-batch by mini-batch as prompt groups complete; replicas as under one_step_stale.

replicas   batch 1 at 0 ....| batch 2 at 0 ....| batch 3 at 1
trainer          ## ## ## ##|       ## ## ## ##|   step 2 ends soon after the last group of its batch
"""

import math
from collections.abc import Sequence

from laminar.config import Config
from laminar.control.messages import GroupId
from laminar.control.schedules.one_step_stale import num_groups_ahead
from laminar.control.schedules.schedule import equal_share
from laminar.control.state import ClusterState, Replica


class Streaming:
    may_repack = False
    interrupts = False
    refresh_wait_max_s = math.inf

    def __init__(self, config: Config) -> None:
        self._config = config

    def takers(self, state: ClusterState) -> Sequence[Replica]:
        return state.empty_replicas() if num_groups_ahead(state, self._config) > 0 else ()

    def num_groups_wanted(self, state: ClusterState, replica: Replica, version: int, num_takers: int) -> int:
        """An equal share of the step to come, and once that is generated, of the one after it."""
        return equal_share(state, self._config, num_groups_ahead(state, self._config))

    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        """A mini-batch's groups, as soon as they are there; the step's last one may be smaller."""
        batch = self._config.batch
        num_wanted = min(batch.num_prompts_per_mini_batch, batch.num_prompts_per_step - len(state.trainer.groups))
        return state.buffer[:num_wanted] if len(state.buffer) >= num_wanted or all_here else ()
