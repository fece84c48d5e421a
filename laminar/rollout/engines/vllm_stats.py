"""Hears from vLLM, once an engine step, how full it is."""

from collections.abc import Callable

import msgspec
from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]
from vllm.v1.metrics.stats import (  # pyright: ignore[reportMissingImports]
    IterationStats,
    MultiModalCacheStats,
    SchedulerStats,
)


class StepStats(msgspec.Struct):
    """As of the last step. kv_utilization: share of the blocks that live requests hold; cached ones are free."""

    kv_utilization: float = 0.0
    num_running: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


def stat_logger(stats: StepStats, on_step: Callable[[], None]) -> Callable[..., StatLoggerBase]:
    """What AsyncLLM takes as a stat logger: keeps `stats` up to date and calls on_step when a step's outputs are in."""

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            """Nothing of the configuration matters here."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                stats.kv_utilization = scheduler_stats.kv_cache_usage
                stats.num_running = scheduler_stats.num_running_reqs
            if iteration_stats is not None:
                stats.num_preemptions += iteration_stats.num_preempted_reqs
            stats.num_steps += 1
            on_step()

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Recorder
