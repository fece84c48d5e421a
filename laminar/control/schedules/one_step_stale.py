"""Makes all replicas generate batch n + 1 while batch n is trained, and switch together: staleness 1.

replicas   batch 1 at 0 | batch 2 at 0 ... | batch 3 at 1 ... | batch 4 at 2
trainer                 | step 1 -> 1      | step 2 -> 2      | step 3 -> 3
"""

import math
from collections.abc import Sequence

from laminar.config import Config
from laminar.control.messages import GroupId
from laminar.control.schedules.schedule import equal_share, num_groups_lacking, whole_step
from laminar.control.state import ClusterState, Replica


class OneStepStale:
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
        return whole_step(state, self._config, all_here=all_here)


def num_groups_ahead(state: ClusterState, config: Config) -> int:
    """Prompt groups still to be dispatched: of the step to come, and of the one after it once all replicas may switch.

    They may when the first of the two is generated to its end. A replica that began the next batch before that would
    do so under weights two steps older than those that the batch is trained on.
    """
    num_generated = len(state.trainer.groups) + len(state.buffer)
    may_switch = state.trainer.has_whole_step or num_generated >= config.batch.num_prompts_per_step
    return num_groups_lacking(state, config, 2 if may_switch else 1)
