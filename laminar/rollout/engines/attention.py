"""Attends: each class is one way in which a forward's rows relate to the KV slots, called once a layer.

A call gets query [num_rows, heads, head_dim], key_value [num_rows, 2, kv_heads, head_dim] (both rotated), writes the
latter into the slots it stands for, and returns [num_rows, heads * head_dim].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from laminar.rollout.engines.kv_slots import Pool


class CausalAttention:
    """Rows are whole texts of equal length, one after another; nothing came before them and nothing is kept."""

    def __init__(self, *, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        q = query.unflatten(0, (self._num_sequences, -1)).transpose(1, 2)
        k, v = key_value.unflatten(0, (self._num_sequences, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(query), -1)


class FreshPrompts:
    """Rows are the first `num_tokens` tokens of several sequences of one pool, padded on the right.

    Padding writes KV beyond a sequence's own, which is overwritten before any of its tokens looks there.
    """

    def __init__(self, pool: Pool, rows: list[int], num_tokens: int) -> None:
        self._layers = pool.layers
        self._rows = torch.tensor(rows)
        self._num_tokens = num_tokens
        self._causal = CausalAttention(num_sequences=len(rows))

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        by_sequence = key_value.unflatten(0, (len(self._rows), self._num_tokens))
        self._layers[layer][:, self._rows, :, : self._num_tokens] = by_sequence.permute(2, 0, 3, 1, 4)
        return self._causal(layer, query, key_value)


class PromptChunk:
    """Rows are tokens `start`, start + 1, ... of one sequence whose earlier ones are in its slot."""

    def __init__(self, pool: Pool, row: int, start: int, num_tokens: int) -> None:
        self._slots = [kv[:, row] for kv in pool.layers]
        self._start, self._end = start, start + num_tokens
        self._mask = torch.ones(num_tokens, self._end, dtype=torch.bool).tril(start)

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        slot = self._slots[layer]
        slot[:, :, self._start : self._end] = key_value.permute(1, 2, 0, 3)
        k, v = slot[:, :, : self._end].unsqueeze(1).unbind(0)
        q = query.transpose(0, 1).unsqueeze(0)
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(query), -1)


class NextTokens:
    """Rows are one token each of every sequence in the slots, pool by pool; each attends to its own slot.

    positions, also as the tensor `at`: [num_rows], where each row's token stands, hence how much of its slot it sees.
    """

    def __init__(self, pools: list[Pool], positions: list[int], at: Tensor) -> None:
        self._parts: list[_PoolPart] = []
        start = 0
        for pool in pools:
            if pool.sequences:
                stop = start + len(pool.sequences)
                self._parts.append(_PoolPart.of(pool, positions[start:stop], at[start:stop], start))
                start = stop

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, query, key_value)
        return torch.cat([part.attend(layer, query[part.rows], key_value[part.rows]) for part in self._parts])


@dataclass(frozen=True, slots=True)
class _PoolPart:
    """A pool's share of a decode step.

    visible: key, value, key, ... of the layers, each [slots, kv_heads, seen, head_dim].
    """

    rows: slice
    slots: Tensor
    positions: Tensor
    layers: tuple[Tensor, ...]
    visible: tuple[Tensor, ...]
    mask: Tensor | None

    @staticmethod
    def of(pool: Pool, positions: list[int], at: Tensor, start: int) -> "_PoolPart":
        num_slots, num_seen = len(positions), max(positions) + 1
        mask = None
        if min(positions) + 1 < num_seen:
            hidden = torch.arange(num_seen) > at.unsqueeze(1)
            mask = torch.zeros(num_slots, num_seen).masked_fill_(hidden, -torch.inf).view(num_slots, 1, 1, num_seen)
        return _PoolPart(
            rows=slice(start, start + num_slots),
            slots=torch.arange(num_slots),
            positions=at,
            layers=pool.layers,
            visible=pool.cache[:, :num_slots, :, :num_seen].unbind(0),
            mask=mask,
        )

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self.layers[layer][:, self.slots, :, self.positions] = key_value
        k, v = self.visible[2 * layer], self.visible[2 * layer + 1]
        # The heads that share a kv head are folded into the query's length: keys are read once, and not repeated.
        num_rows, num_kv_heads, _, head_dim = k.shape
        q = query.view(num_rows, num_kv_heads, -1, head_dim)
        return scaled_dot_product_attention(q, k, v, attn_mask=self.mask).reshape(num_rows, -1)
