"""Computes what a vLLM replica needs of each GPU's memory, from the model's shape alone, before anything starts."""

import math

import msgspec

from laminar.config import VllmEngineConfig
from laminar.rollout.engines.architecture import Architecture, kv_bytes_per_token, tensor_shapes

GIB = 2**30
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RUNTIME_BYTES = 2 * GIB
"""CUDA's context, NCCL, CUDA graphs: what no shape tells. vLLM measures it when it starts."""
LOGIT_BYTES = 8
"""Of each logit of a step: float32, and its log-softmax beside it."""


class GpuMemory(msgspec.Struct, frozen=True):
    """Bytes on one GPU of a replica. kv_bytes: what is left for the KV cache, or what is asked of it."""

    budget_bytes: int
    weights_bytes: int
    workspace_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int

    @property
    def kv_capacity_tokens(self) -> int:
        """Every tensor-parallel rank holds its heads' share of every token."""
        return max(0, self.kv_bytes) // self.kv_bytes_per_token


def num_parameters(architecture: Architecture) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(architecture).values())


def gpu_memory(config: VllmEngineConfig, architecture: Architecture) -> GpuMemory:
    """Weights and KV heads are split evenly; the workspace is what the widest step keeps at once."""
    ranks, element_bytes = config.tensor_parallel_size, ELEMENT_BYTES[config.dtype]
    a = architecture
    # KV heads that are fewer than the ranks are held by several of them.
    share = max(1, a.num_kv_heads // ranks) / a.num_kv_heads
    per_token = max(1, round(kv_bytes_per_token(a, element_bytes=element_bytes) * share))
    weights = num_parameters(a) * element_bytes // ranks
    widest = config.prefill_chunk_tokens * element_bytes * (4 * a.hidden_size + 3 * a.intermediate_size // ranks)
    logits = config.num_slots * a.vocab_size * LOGIT_BYTES
    workspace = RUNTIME_BYTES + widest + logits
    budget = int(config.device_memory_gib * config.device_memory_ratio * GIB)
    asked = config.kv_capacity_tokens
    kv_bytes = asked * per_token if asked is not None else budget - weights - workspace
    return GpuMemory(budget, weights, workspace, kv_bytes, per_token)


def refuse_too_little_memory(config: VllmEngineConfig, memory: GpuMemory, *, num_tokens_max: int) -> None:
    """Raise ValueError, with the arithmetic in it, if a replica cannot hold its weights and one longest trajectory."""
    needed = memory.weights_bytes + memory.workspace_bytes + max(num_tokens_max * memory.kv_bytes_per_token, 0)
    if config.kv_capacity_tokens is not None:
        needed = memory.weights_bytes + memory.workspace_bytes + memory.kv_bytes
    if needed > memory.budget_bytes:
        raise ValueError(
            f"a GPU of a replica needs {memory.weights_bytes / GIB:.1f} GiB of weights + "
            f"{memory.workspace_bytes / GIB:.1f} GiB to work in + "
            f"{(needed - memory.weights_bytes - memory.workspace_bytes) / GIB:.1f} GiB of KV cache = "
            f"{needed / GIB:.1f} GiB, and engine.device_memory_gib={config.device_memory_gib:g} x "
            f"engine.device_memory_ratio={config.device_memory_ratio:g} = {memory.budget_bytes / GIB:.1f} GiB; raise "
            "engine.tensor_parallel_size or the ratio, or lower data.response_tokens_max"
        )


def tell(config: VllmEngineConfig, memory: GpuMemory, architecture: Architecture, *, num_tokens_max: int) -> list[str]:
    """The arithmetic, line by line, for a reader."""
    ranks = config.tensor_parallel_size
    per_gpu = "each GPU of a replica" if ranks > 1 else "the GPU of a replica"
    capacity = memory.kv_capacity_tokens
    return [
        f"{num_parameters(architecture) / 1e9:.2f} G parameters x {ELEMENT_BYTES[config.dtype]} bytes "
        f"({config.dtype}) / {ranks} = {memory.weights_bytes / GIB:.1f} GiB of weights on {per_gpu}",
        f"a token's KV there: 2 x {architecture.num_layers} layers x {architecture.num_kv_heads} heads x "
        f"{architecture.head_dim} x {ELEMENT_BYTES[config.dtype]} bytes, its share = {memory.kv_bytes_per_token} bytes",
        f"{memory.budget_bytes / GIB:.1f} GiB budget - {memory.weights_bytes / GIB:.1f} weights - "
        f"{memory.workspace_bytes / GIB:.1f} workspace -> {memory.kv_bytes / GIB:.1f} GiB of KV cache",
        f"{capacity:,} KV tokens = {capacity / num_tokens_max:.0f} longest trajectories of {num_tokens_max:,} tokens",
    ]
