"""Holds a second copy of the policy that is not trained: the step's first weights, or the run's."""

import torch
from torch import Tensor

from laminar.train.packing import MicroBatch
from laminar.train.policy import Policy, held


class FrozenPolicy:
    """Costs as much memory as the weights, and a forward pass for every micro-batch that is asked about."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.requires_grad_(False)

    @torch.no_grad()
    def take(self, policy: Policy) -> None:
        """Become what `policy` is now."""
        for (_, ours), (_, theirs) in zip(self._policy.weights(), policy.weights(), strict=True):
            held(ours).copy_(held(theirs))

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Of the trained tokens, nats: [num_trained_tokens]."""
        logprobs, _ = self._policy(micro_batch, temperature)
        return logprobs
