"""Stores a decoder's weights, fused and transposed for small matrix products, and fills them from a published version.

Every matrix is kept as [in, out]: at batch 1 to 64 such products take 0.6 to 0.9 of the time of [out, in]. Within each
head of q and k the two components of a rotary pair lie side by side, so that rotating is one complex product; scores
do not change, as q and k are permuted alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.architecture import Architecture, tensor_shapes
from laminar.rollout.engines.published import refuse_misfits
from laminar.rollout.engines.segment_tensors import tensors_in


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; a bias or head norm that the architecture lacks is None.

    A norm is as long twice over as what it scales, the second half zero (Transformer._norm).
    """

    input_norm: Tensor
    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]: q, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor  # [heads * head_dim, hidden]
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor of `shape` goes, and whether its rotary pairs are joined, and it is transposed."""

    shape: tuple[int, ...]
    target: Tensor
    paired: bool = False
    transposed: bool = False


class Weights:
    """All weights in float32, allocated once, zero until the first version is copied in."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._places: dict[str, Place] = {}
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        self.embedding = self._plain("model.embed_tokens.weight", vocab, hidden)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(architecture.num_layers)]
        self.final_norm = self._norm("model.norm.weight", hidden)
        if architecture.tied_embeddings:
            self.head = self.embedding.t()
        else:
            self.head = torch.zeros(hidden, vocab)
            self._places["lm_head.weight"] = Place((vocab, hidden), self.head, transposed=True)

    def refuse_misfits(self, leased: LeasedVersion) -> None:
        """WrongWeights, by name, if the version's tensors are not this model's."""
        refuse_misfits(leased, tensor_shapes(self._architecture), self._architecture.model_type)

    def copy_from(self, leased: LeasedVersion) -> None:
        """Overwrite every weight in place by those of a version that fits.

        Keeps no reference to the segment's bytes: the lease may end when this returns.
        """
        for name, published in tensors_in(leased.data, leased.manifest.tensors):
            self._fill(self._places[name], published)

    def _fill(self, place: Place, published: Tensor) -> None:
        if place.paired:
            # A checkpoint's head lists the first of every pair, then the second.
            pairs = published.unflatten(0, (-1, 2, self._architecture.head_dim // 2)).transpose(1, 2)
            published = pairs.reshape(place.shape)
        if place.transposed:
            # Into a contiguous matrix torch transposes by blocks: for large ones 4 times faster than into a slice.
            published = published.t().contiguous()
        place.target.copy_(published)

    def _plain(self, name: str, *shape: int) -> Tensor:
        storage = torch.zeros(*shape)
        self._places[name] = Place(shape, storage)
        return storage

    def _layer(self, prefix: str) -> LayerWeights:
        a = self._architecture
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        num_q, num_kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        qkv = torch.zeros(a.hidden_size, num_q + 2 * num_kv)
        qkv_bias = torch.zeros(num_q + 2 * num_kv) if a.qkv_bias else None
        start = 0
        for name, size in (("q_proj", num_q), ("k_proj", num_kv), ("v_proj", num_kv)):
            paired, part = name != "v_proj", slice(start, start + size)
            self._places[f"{attention}{name}.weight"] = Place((size, a.hidden_size), qkv[:, part], paired, True)
            if qkv_bias is not None:
                self._places[f"{attention}{name}.bias"] = Place((size,), qkv_bias[part], paired)
            start += size
        gate_up = torch.zeros(a.hidden_size, 2 * a.intermediate_size)
        for name, part in (
            ("gate_proj", gate_up[:, : a.intermediate_size]),
            ("up_proj", gate_up[:, a.intermediate_size :]),
        ):
            self._places[f"{mlp}{name}.weight"] = Place((a.intermediate_size, a.hidden_size), part, transposed=True)
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight", a.hidden_size),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=self._norm(attention + "q_norm.weight", a.head_dim, paired=True) if a.qk_norm else None,
            k_norm=self._norm(attention + "k_norm.weight", a.head_dim, paired=True) if a.qk_norm else None,
            output=self._transposed(attention + "o_proj.weight", a.hidden_size, num_q),
            output_bias=self._plain(attention + "o_proj.bias", a.hidden_size) if a.output_bias else None,
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", a.hidden_size),
            gate_up=gate_up,
            down=self._transposed(mlp + "down_proj.weight", a.hidden_size, a.intermediate_size),
        )

    def _transposed(self, name: str, num_out: int, num_in: int) -> Tensor:
        storage = torch.zeros(num_in, num_out)
        self._places[name] = Place((num_out, num_in), storage, transposed=True)
        return storage

    def _norm(self, name: str, size: int, *, paired: bool = False) -> Tensor:
        storage = torch.zeros(2 * size)
        self._places[name] = Place((size,), storage[:size], paired)
        return storage
