"""Computes a dense decoder (Qwen2, Qwen3, Llama) on flat rows of tokens, and leaves attention to whoever holds the KV.

x: [num_rows, hidden]; a row is one token of some sequence. `attend(layer, query, key_value)` gets the rows' rotated
query [num_rows, heads, head_dim] and key and value [num_rows, 2, kv_heads, head_dim], returns
[num_rows, heads * head_dim] (attention.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.architecture import inverse_frequencies, read_architecture
from laminar.rollout.engines.attention import CausalAttention
from laminar.rollout.engines.published import check_probe, refuse_without_probe
from laminar.rollout.engines.weights import Weights

Attend = Callable[[int, Tensor, Tensor], Tensor]
NUM_POSITIONS_AT_FIRST = 1024


class Transformer:
    def __init__(self, model_path: Path) -> None:
        self.architecture = read_architecture(model_path)
        self.weights = Weights(self.architecture)
        self._rotations = self._make_rotations(NUM_POSITIONS_AT_FIRST)

    def reserve_positions(self, num_positions: int) -> None:
        """Make positions below `num_positions` computable; doubles, so that long contexts cost memory only if used."""
        while len(self._rotations) < num_positions:
            self._rotations = self._make_rotations(2 * len(self._rotations))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [num_rows, hidden], before the final norm. Both inputs: [num_rows], int64."""
        a = self.architecture
        num_rows, num_rotary = token_ids.shape[0], a.num_heads + a.num_kv_heads
        rotation = self._rotations[positions].unsqueeze(1)
        x = self.weights.embedding[token_ids]
        for index, layer in enumerate(self.weights.layers):
            h = _linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = h.view(num_rows, num_rotary + a.num_kv_heads, a.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = heads[:, : a.num_heads], heads[:, a.num_heads : num_rotary]
                query.copy_(self._norm(query, layer.q_norm))
                key.copy_(self._norm(key, layer.k_norm))
            torch.view_as_complex(heads[:, :num_rotary].view(num_rows, num_rotary, -1, 2)).mul_(rotation)
            query, key_value = heads.split_with_sizes((a.num_heads, 2 * a.num_kv_heads), 1)
            attended = attend(index, query, key_value.view(num_rows, 2, a.num_kv_heads, a.head_dim))
            x = torch.addmm(x, attended, layer.output)
            if layer.output_bias is not None:
                x += layer.output_bias
            gate, up = torch.mm(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, 1)
            x = torch.addmm(x, silu(gate).mul_(up), layer.down)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, vocab]."""
        return torch.mm(self._norm(x, self.weights.final_norm), self.weights.head)

    def load(self, leased: LeasedVersion) -> None:
        """Copy in a version that fits (`weights.refuse_misfits`) and check it.

        After WrongWeights the weights are not to be used.
        """
        self.weights.copy_from(leased)
        version, probe = leased.manifest.version, leased.manifest.probe
        refuse_without_probe(version, probe)
        check_probe(version, probe, self.score(probe.token_ids).tolist(), tolerance=probe.tolerance)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs of tokens 1.. given those before them, at temperature 1: [len - 1], float64."""
        self.reserve_positions(len(token_ids))
        ids = torch.tensor(token_ids)
        x = self.forward(ids, torch.arange(len(ids)), CausalAttention(num_sequences=1))
        logprobs = self.logits(x[:-1]).double().log_softmax(-1)
        return logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)

    def _make_rotations(self, num_positions: int) -> Tensor:
        """[num_positions, head_dim / 2], complex: by how much each pair of a head turns at each position."""
        angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(self.architecture))
        return torch.polar(torch.ones_like(angles), angles)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of the last dimension by torch's LayerNorm of [x, -x], whose mean is 0; weight: [2 * size].

        Two kernels where torch.rms_norm takes nine on a CPU: 5 % of a small model's step at batch 1.
        """
        mirrored = torch.cat((x, -x), -1)
        eps = self.architecture.rms_norm_eps
        return torch.layer_norm(mirrored, (mirrored.shape[-1],), weight, None, eps)[..., : x.shape[-1]]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
