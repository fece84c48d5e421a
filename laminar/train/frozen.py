"""Holds a second copy of the policy that is not trained: the step's first weights, or the run's."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar.train.logprobs import token_logprobs
from laminar.train.packing import MicroBatch


class FrozenPolicy:
    """Costs as much memory as the weights, and a forward pass for every micro-batch that is asked about."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def take(self, model: PreTrainedModel) -> None:
        """Become what `model` is now."""
        for ours, theirs in zip(self._model.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Of the trained tokens, nats: [num_tokens]."""
        logprobs, _ = token_logprobs(self._model, micro_batch, temperature)
        return logprobs
