"""A small simulated cluster that runs in a moment, for tests to change."""

from typing import Any

from laminar.config import Config
from laminar.settings import parse_config

SCHEDULES = ("trajectory_level", "synchronous", "one_step_stale", "streaming", "partial_rollout")


def small(*, seed: int = 0, schedule: str = "trajectory_level", **simulation: Any) -> Config:
    """Eight replicas on four machines; 8 prompts x 4 a step, two mini-batches; a KV budget that half a batch fills."""
    values: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train_files": ["none"], "prompt_tokens_max": 64, "response_tokens_max": 1024},
        "batch": {"num_prompts_per_step": 32, "group_size": 4, "num_mini_batches": 2},
        "rollout": {"num_groups_per_replica_max": 8},
        "schedule": {"kind": schedule},
        "seed": seed,
        "simulation": {
            "num_gpus": 16,
            "num_gpus_per_machine": 2,
            "tensor_parallel": 1,
            "gpu_memory_share": 0.1485,
            "model": {"kind": "described", "num_parameters": 4e9, "num_layers": 32, "kv_bytes_per_token": 20_000},
            "decode": {
                "kind": "coefficients",
                "floor_s": 0.02,
                "per_kv_token_s": 1e-7,
                "per_running_s": 5e-4,
                "prefill_s_per_token": 1e-5,
            },
            "lengths": {"kind": "lognormal", "median_tokens": 200, "log_sd": 0.8},
            "training": {"fixed_s_per_mtoken": 50, "gpu_s_per_mtoken": 2000},
            "num_steps": 8,
            "num_warmup_steps": 2,
            "heartbeat_interval_s": 10,
            **simulation,
        },
    }
    return parse_config(values, "small")
