"""Makes the policy one thing to call, whether its weights lie whole in this process or sharded over ranks (FSDP2).

call ──► FSDP gathers the root's weights (embedding, norm, head) ─► each layer's, layer by layer ─► log-probs
weights between calls: one DTensor each, of which this rank holds some rows
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from laminar.config import Config, TrainerConfig
from laminar.relay.shards import Rows
from laminar.train.logprobs import token_logprobs
from laminar.train.model import load_model
from laminar.train.packing import MicroBatch
from laminar.train.ranks import Ranks, compute_dtype


class Policy(nn.Module):
    """A causal LM. Every rank calls it equally often, since a call gathers weights from all."""

    def __init__(self, model: PreTrainedModel, *, float32_head: bool) -> None:
        super().__init__()
        self.model = model
        self._float32_head = float32_head

    def forward(self, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs (nats, with gradient) and entropies (without) of the trained tokens: [num_trained_tokens]."""
        return token_logprobs(self.model, micro_batch, temperature, float32_head=self._float32_head)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight under its Hugging Face name, tied ones once."""
        if isinstance(self, FSDPModule):
            # After a forward pass without a backward one the root's weights are still gathered.
            self.reshard()
        yield from self.model.named_parameters()


def build_policy(config: Config, ranks: Ranks) -> Policy:
    """The initial weights, float32, on the ranks' device; each rank reads the whole model once and keeps its rows."""
    policy = Policy(load_model(config.model.path), float32_head=config.trainer.float32_head)
    layers = _layers(policy.model)
    if config.trainer.activation_checkpointing:
        for layer in layers:
            checkpoint(layer)
    if ranks.mesh is not None:
        _shard(policy, layers, ranks, config.trainer)
    return policy


def held(weight: Tensor) -> Tensor:
    """The rows of a weight that this rank holds: all, unless it is sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def held_rows(weight: DTensor) -> Rows:
    """Which rows those are. FSDP gives the first ranks equally many, and the last what is left, which may be none."""
    num_rows = weight.shape[0]
    rows_per_rank = -(-num_rows // weight.device_mesh.size())
    first = min(num_rows, weight.device_mesh.get_local_rank() * rows_per_rank)
    return Rows(tuple(weight.shape), first, weight.to_local().shape[0])


def whole(weight: Tensor) -> Tensor:
    """The weight put together from all ranks, each of which must ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _shard(policy: Policy, layers: list[nn.Module], ranks: Ranks, config: TrainerConfig) -> None:
    dtype = compute_dtype(config)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, policy):
        sharded: Any = fully_shard(module, mesh=ranks.mesh, mp_policy=precision)
        # Weights of tokens already add up to the mini-batch's mean, so gradients are summed over ranks, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers: what is gathered, and with activation checkpointing computed again, as one."""
    decoder: Any = model.base_model
    return list(decoder.layers)
