"""Attends within each trajectory of a packed micro-batch: trajectories laid end to end, without a padding token.

Everything else in a transformer works a token at a time, so attention is all that must know where one trajectory ends
and the next begins. Neighbours of equal length attend together in one call, each for itself; nobody builds a mask.
"""

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "laminar_packed"
"""The name under which transformers finds it: `attn_implementation`."""

Runs = tuple[tuple[int, int], ...]
"""(how many trajectories, their length), in the order in which they are laid."""


def runs_of(lengths: list[int]) -> Runs:
    return tuple((len(list(equal)), length) for length, equal in groupby(lengths))


def register_packed_attention() -> None:
    """Make it known to transformers, under a name of our own; again does nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,  # noqa: ARG001  (transformers gives it to every attention, as it does what is in `unused`)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    runs: Runs | None = None,
    **unused: object,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """query: [num_rows, num_heads, num_tokens, head_size]; key, value: the same with their own heads.

    runs: how the one row is packed, as given to the model's forward; none: every row is one whole sequence, and all
    are equally long. Returns [num_rows, num_tokens, num_heads, head_size].
    """
    assert attention_mask is None, "padding is never laid out here, so there is nothing to mask"
    if runs is None:
        return _attend(query, key, value, scaling).transpose(1, 2), None
    attended: list[Tensor] = []
    begin = 0
    for num_sequences, length in runs:
        end = begin + num_sequences * length
        # [1, heads, sequences * length, size] → [sequences, heads, length, size]: views, nothing is copied.
        parts = (x[0, :, begin:end].unflatten(1, (num_sequences, length)).transpose(0, 1) for x in (query, key, value))
        attended.append(_attend(*parts, scaling).transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(attended)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
