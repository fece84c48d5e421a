"""Lets the trainer take mini-batch by mini-batch as prompt groups complete; replicas as under one_step_stale.

replicas   batch 1 at 0 ....| batch 2 at 0 ....| batch 3 at 1
trainer          ## ## ## ##|       ## ## ## ##|   step 2 ends soon after the last group of its batch
"""

from collections.abc import Sequence

from laminar.control.messages import GroupId
from laminar.control.schedules.one_step_stale import OneStepStale
from laminar.control.state import ClusterState


class Streaming(OneStepStale):
    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        """A mini-batch's groups, as soon as they are there; the step's last one may be smaller."""
        batch = self._config.batch
        num_wanted = min(batch.num_prompts_per_mini_batch, batch.num_prompts_per_step - len(state.trainer.groups))
        return state.buffer[:num_wanted] if len(state.buffer) >= num_wanted or all_here else ()
