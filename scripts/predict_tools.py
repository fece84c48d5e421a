"""Predicts a run of scripts/compare_tools.py with the simulator, from what another run of the same seed measured."""

import json
from pathlib import Path

import msgspec
import numpy as np

from examples.calculator.slow_tool import latency_s
from laminar.config import Config
from laminar.control.costs import PROFILES, scale_profile
from laminar.control.messages import Loaded
from laminar.observe.event_log import segments
from laminar.observe.run_folder import read_run
from laminar.settings import parse_config
from laminar.sim.outcome import outcome
from laminar.sim.run import is_colocated, simulate
from laminar.sim.shape import ACTIVATION_BYTES, GPU_MEMORY_BYTES

GPU = "h800"
MEMORY_SHARE = 0.9
NUM_PARAMETERS = 118_000
NUM_LATENCIES = 1_000
LATENCIES_FILE = "latencies.json"
REWARD_S = 0.1
"""From a response to its score: mostly the wait for the next report."""


class Measured(msgspec.Struct, frozen=True):
    """Means over a live run. train_s_per_token: of the trainer's time, prompt tokens included."""

    run_dir: Path
    prompt_tokens: float
    response_tokens: float
    calls: float
    train_s_per_token: float
    load_s: float


def measure(run_dir: Path) -> Measured:
    run = read_run(run_dir)
    steps = [row.values for row in run.metrics if "response_length/mean" in row.values]

    def mean(name: str) -> float:
        return float(np.mean([values[name] or 0.0 for values in steps]))

    prompt, response = mean("prompt_length/mean"), mean("response_length/mean")
    num_tokens = run.summary.num_trajectories_trained * (prompt + response)
    trainer_s = run.summary.train_s * (1 - run.summary.idle_ratio.trainer)
    events = (record.event for segment in segments(run_dir) for record in segment.records)
    load_s = float(np.mean([event.load_s for event in events if isinstance(event, Loaded)]))
    return Measured(run_dir, prompt, response, mean("tool_call_counts/mean"), trainer_s / num_tokens, load_s)


def predict(run_dir: Path, measured: Measured) -> list[str]:
    """What the simulator makes of the configuration of run_dir: response tokens a second, and idle shares."""
    config = read_run(run_dir).config
    simulated = outcome(simulate(parse_config(config.model_dump() | {"simulation": _simulation(config, measured)}, "")))
    response_share = measured.response_tokens / (measured.response_tokens + round(measured.prompt_tokens))
    return [
        f"{simulated.tokens_per_s * response_share:,.0f}",
        f"{simulated.replicas_idle:.2f}",
        f"{simulated.trainer_idle:.2f}",
    ]


def _simulation(config: Config, measured: Measured) -> dict[str, object]:
    """One accelerator a replica, whose memory and step times are those of the paced engine."""
    engine, paced = config.engine, config.paced
    assert paced is not None, "the comparison's engines are paced"
    assert engine.kv_capacity_tokens is not None, "and so they are our own"
    profile = scale_profile(
        PROFILES[paced.accelerator],
        time_scale=paced.time_scale,
        batch_scale=paced.batch_scale,
        kv_capacity_tokens=engine.kv_capacity_tokens,
    )
    num_replicas = config.rollout.num_replicas
    kv_bytes = GPU_MEMORY_BYTES[GPU] * MEMORY_SHARE - ACTIVATION_BYTES - 2 * NUM_PARAMETERS
    latencies = [latency_s((n + 0.5) / NUM_LATENCIES) for n in range(NUM_LATENCIES)]
    (measured.run_dir / LATENCIES_FILE).write_text(json.dumps(latencies))
    return {
        # A simulated synchronous trainer takes turns with the replicas on their own accelerators.
        "num_gpus": num_replicas + (0 if is_colocated(config) else 1),
        "num_train_gpus": None if is_colocated(config) else 1,
        "tensor_parallel": 1,
        "accelerator": GPU,
        "gpu_memory_share": MEMORY_SHARE,
        "model": {
            "kind": "described",
            "num_parameters": NUM_PARAMETERS,
            "num_layers": 1,
            "kv_bytes_per_token": int(kv_bytes / engine.kv_capacity_tokens),
        },
        "num_running_max": engine.num_slots,
        "block_tokens": engine.block_tokens,
        "decode": {
            "kind": "coefficients",
            "floor_s": profile.decode.floor_s,
            "per_kv_token_s": profile.decode.per_kv_token_s,
            "per_running_s": profile.decode.per_running_s,
            # The simulated engine takes a whole context in after every call; ours keeps it (engine.kept_kv_share_max),
            # and computes the prompt of a group once. What is left to take in is a tenth of the tokens.
            "prefill_s_per_token": 0.0,
        },
        "lengths": {"kind": "run", "path": measured.run_dir},
        "prompt_tokens": round(measured.prompt_tokens),
        # 0 to twice the mean, all equally likely.
        "tools": {
            "num_calls_max": round(2 * measured.calls),
            "latency": {"kind": "file", "path": measured.run_dir / LATENCIES_FILE},
        },
        "training": {"fixed_s_per_mtoken": 1e6 * measured.train_s_per_token, "gpu_s_per_mtoken": 0},
        "weights": {"broadcast": "formula", "load_bytes_per_s": 2 * NUM_PARAMETERS / measured.load_s},
        "reward_s": REWARD_S,
        "replica_start_s": 0.001,
        "report_interval_s": config.rollout.report_interval_s,
        "heartbeat_interval_s": config.rollout.report_interval_s,
        "num_steps": config.trainer.num_steps,
        "num_warmup_steps": 0,
    }
