"""Reads a Hugging Face config.json into the few numbers that a dense decoder needs; refuses what it cannot serve."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("qwen2", "qwen3", "llama")
ROPE_TYPES = ("default", "linear", "llama3")


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding: `kind` is one of ROPE_TYPES, the rest as config.json names it."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class Architecture(msgspec.Struct, frozen=True):
    """The shape of a Qwen2, Qwen3 or Llama checkpoint.

    qkv_bias, output_bias: whether the attention's projections in and out have one. qk_norm: Qwen3's norm of each head.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_positions_max: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rope: Rope


def read_architecture(model_path: Path) -> Architecture:
    """Read `model_path`/config.json. ValueError names the field that this engine does not implement."""
    path = model_path / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={model_path} has no config.json; give the folder of a Hugging Face model")
    config = json.loads(path.read_text())
    _refuse_what_is_not_implemented(config, path)
    model_type = config["model_type"]
    attention_bias = bool(config.get("attention_bias", False))
    num_heads = config["num_attention_heads"]
    return Architecture(
        model_type=model_type,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or (128 if model_type == "qwen3" else config["hidden_size"] // num_heads),
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        num_positions_max=config.get("max_position_embeddings", 32768),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=model_type != "qwen2" and attention_bias,
        qk_norm=model_type == "qwen3",
        rope=_read_rope(config, path),
    )


def read_stop_token_ids(model_path: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, else of config.json; none if neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = model_path / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def tensor_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its checkpoint name; a tied lm_head is not stated again."""
    num_q, num_kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for index in range(a.num_layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        for name, size in (("q_proj", num_q), ("k_proj", num_kv), ("v_proj", num_kv)):
            shapes[f"{attention}{name}.weight"] = (size, a.hidden_size)
            if a.qkv_bias:
                shapes[f"{attention}{name}.bias"] = (size,)
        shapes[f"{attention}o_proj.weight"] = (a.hidden_size, num_q)
        if a.output_bias:
            shapes[f"{attention}o_proj.bias"] = (a.hidden_size,)
        if a.qk_norm:
            shapes |= {f"{attention}q_norm.weight": (a.head_dim,), f"{attention}k_norm.weight": (a.head_dim,)}
        shapes |= {f"{mlp}{name}.weight": (a.intermediate_size, a.hidden_size) for name in ("gate_proj", "up_proj")}
        shapes[f"{mlp}down_proj.weight"] = (a.hidden_size, a.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{index}.{name}.weight"] = (a.hidden_size,)
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def kv_bytes_per_token(a: Architecture, *, element_bytes: int) -> int:
    """Of one token's keys and values in all layers, over all tensor-parallel ranks."""
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * element_bytes


def inverse_frequencies(architecture: Architecture) -> "torch.Tensor":
    """Radians a position for each pair of a head's components: [head_dim / 2], float32.

    Computed in the same order of float32 operations as transformers, whose log-probs ours must equal.
    """
    import torch  # heavy, and whoever only checks a model does not need it

    rope, head_dim = architecture.rope, architecture.head_dim
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _stretch_low_frequencies(plain, rope)
        case _:
            return plain


def _stretch_low_frequencies(plain: "torch.Tensor", rope: Rope) -> "torch.Tensor":
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    context = rope.original_max_position_embeddings
    keep = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _refuse_what_is_not_implemented(config: dict[str, Any], path: Path) -> None:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type={model_type!r} is not served, only {MODEL_TYPES}")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    refusals = {
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "layer_types": layer_types != {"full_attention"},
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": config.get("quantization_config") is not None,
    }
    for field, refused in refusals.items():
        if refused:
            raise ValueError(f"{path}: {field}={config[field]!r} of this {model_type} is not implemented")


def _read_rope(config: dict[str, Any], path: Path) -> Rope:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    fields = config.get(name) or {}
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_TYPES or fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{path}: {name}={fields!r} of this {config['model_type']} is not implemented, "
            f"only rope types {ROPE_TYPES} over the whole head"
        )
    return Rope(
        theta=fields.get("rope_theta") or config.get("rope_theta") or 10000.0,
        kind=kind,
        factor=fields.get("factor") or 1.0,
        low_freq_factor=fields.get("low_freq_factor") or 1.0,
        high_freq_factor=fields.get("high_freq_factor") or 4.0,
        original_max_position_embeddings=fields.get("original_max_position_embeddings") or 8192,
    )
