"""Reads what comes with the simulator: published figures of the Laminar paper, and measured kernels."""

import functools
from importlib.resources import files

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution by pairs of (share, value), ascending in both."""

    quantiles: list[tuple[float, float]]


class RepackOnOff(msgspec.Struct, frozen=True):
    on: float
    off: float


class PublishedRepack(msgspec.Struct, frozen=True):
    """Repack on and off at 32B on 128 GPUs (Table 1, figure 16 from 800 s on)."""

    kv_utilization: RepackOnOff
    latency_mean_s: RepackOnOff
    latency_max_s: RepackOnOff
    generation_tokens_per_s: RepackOnOff
    overhead_s: float


class PublishedWait(msgspec.Struct, frozen=True):
    """Seconds that a replica waits for weights, by GPUs that generate (figure 14)."""

    gpu_sync: dict[int, float]
    """All replicas together, by one global broadcast."""
    mean: dict[int, float]
    best: dict[int, float]


class PublishedFault(msgspec.Struct, frozen=True):
    """Two of 16 replicas lost at 32B on 128 GPUs (figure 15). trained: (seconds, tokens/s) at the end of each step."""

    lost_at_s: float
    outage_s: float
    num_replicas_lost: int
    trained: list[tuple[float, float]]


class Published(msgspec.Struct, frozen=True):
    source: str
    throughput_tokens_per_s: dict[str, dict[int, dict[str, float]]]
    """By series, GPUs and schedule (figure 11)."""
    splits_train_rollout_gpus: dict[str, dict[str, dict[int, tuple[int, int]]]]
    """By schedule, model size and GPUs (Table 2)."""
    decode_step_ms_at_4096: dict[str, dict[int, float]]
    """On H800, by `<size>_TP<n>` and batch, all at a context of 4,096 tokens (figure 4)."""
    response_tokens: dict[str, Quantiles]
    """By checkpoint (figure 17)."""
    tool_latency_s: dict[str, Quantiles]
    """Of a code sandbox (figure 2)."""
    broadcast_s: dict[str, dict[int, float]]
    """By model size and machines (figure 18)."""
    wait_for_weights_s: dict[str, PublishedWait]
    staleness_at_finish_percent: dict[int, dict[int, float]]
    """By half hour and staleness, 7B on 64 GPUs (figure 10)."""
    repack_32b_128: PublishedRepack
    fault_32b_128: PublishedFault


class Kernels(msgspec.Struct, frozen=True):
    """Measured step times in ms. decode: by `<accelerator> <size> TP<n>`, context and batch; prefill: by its tokens."""

    source: str
    batches: list[int]
    prefill_tokens: list[int]
    contexts: list[int]
    decode_step_ms: dict[str, dict[int, list[float]]]
    prefill_ms: dict[str, list[float]]


@functools.cache
def published() -> Published:
    return msgspec.json.decode(_read("published.json"), type=Published)


@functools.cache
def kernels() -> Kernels:
    return msgspec.json.decode(_read("kernels.json"), type=Kernels)


def _read(name: str) -> bytes:
    return (files("laminar.sim") / "data" / name).read_bytes()
