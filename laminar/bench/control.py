"""Measures how fast the control plane decides at full size: 256 replicas, 16,384 trajectories on them, one core.

A virtual cluster (busy_cluster.py) answers the commands; only `ControlPlane.handle` is timed, event by event, garbage
collection included. `plan_repack` is timed by itself, on tails that nearly all fit, that differ in version, and that
fit nowhere, which takes it longest.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from laminar.bench.busy_cluster import BusyCluster
from laminar.config import (
    BatchConfig,
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OneStepStaleSchedule,
    PartialRolloutSchedule,
    RolloutConfig,
    ScheduleConfig,
    StreamingSchedule,
    SynchronousSchedule,
    TrajectoryLevelSchedule,
)
from laminar.control.messages import MachineId, ReplicaId, TrajectoryId
from laminar.control.plane import ControlPlane
from laminar.control.repack import plan_repack
from laminar.control.state import Replica
from laminar.control.trajectory_state import UNFINISHED

SCHEDULES: tuple[ScheduleConfig, ...] = (
    TrajectoryLevelSchedule(),
    SynchronousSchedule(),
    OneStepStaleSchedule(),
    StreamingSchedule(),
    PartialRolloutSchedule(),
)
NUM_REPLICAS, NUM_MACHINES = 256, 128
NUM_PROMPTS = 17_917
"""Of DAPO's data set; control draws their order once an epoch."""
NUM_EVENTS = 200_000
LOOK_INTERVAL_EVENTS = 1000
NUM_PLANS = 50


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench control", description=__doc__)
    parser.add_argument("schedules", nargs="*", help="kinds of schedules; all of them if none is named")
    parser.add_argument("--events", type=int, default=NUM_EVENTS, help="events a schedule")
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    arguments = parser.parse_args(argv)
    for shape in ("fit", "versions", "nothing_fits"):
        _print(measure_plan(shape), arguments.json)
    for schedule in SCHEDULES:
        if not arguments.schedules or schedule.kind in arguments.schedules:
            _print(measure_handle(schedule, arguments.events), arguments.json)
    return 0


def measure_handle(schedule: ScheduleConfig, num_events: int) -> dict[str, object]:
    """Microseconds of `handle` over a stream that begins with the start of the run, in all and by kind of event."""
    config = _config(schedule)
    control = ControlPlane(config, num_prompts=NUM_PROMPTS, num_evaluation_prompts=config.evaluation.num_prompts_max)
    cluster = BusyCluster(config, seed=0)
    taken_us: dict[str, list[float]] = {}
    num_live: list[int] = []
    for number, (now, event) in enumerate(cluster.events()):
        if number == num_events:
            break
        began_ns = time.thread_time_ns()
        commands = control.handle(event, now)
        taken_us.setdefault(type(event).__name__, []).append((time.thread_time_ns() - began_ns) / 1e3)
        for command in commands:
            cluster.execute(command)
        if number % LOOK_INTERVAL_EVENTS == 0:
            num_live.append(sum(t.state in UNFINISHED for t in control.state.trajectories.values()))
    control.state.check()
    counters = control.state.counters
    return {
        "measurement": "handle",
        "schedule": schedule.kind,
        "num_replicas": NUM_REPLICAS,
        "num_live_median": statistics.median(num_live),
        "num_live_max": max(num_live),
        "virtual_s": round(cluster.now, 1),
        "num_steps": control.state.trainer.step,
        "num_trajectories_moved": counters.num_trajectories_moved,
        "num_trajectories_rescued": counters.num_trajectories_rescued,
        **_spread([us for kind in taken_us.values() for us in kind]),
        "by_event": {kind: _spread(us) for kind, us in sorted(taken_us.items(), key=lambda item: -len(item[1]))},
    }


def measure_plan(shape: str) -> dict[str, object]:
    """Milliseconds of one plan over 256 replicas that are all in their tails."""
    taken_ms: list[float] = []
    num_moves: list[int] = []
    for seed in range(NUM_PLANS):
        replicas = _tails(shape, random.Random(seed))
        began_ns = time.thread_time_ns()
        plan = plan_repack(replicas, kv_utilization_max=0.99)
        taken_ms.append((time.thread_time_ns() - began_ns) / 1e6)
        num_moves.append(len(plan))
    return {
        "measurement": "plan_repack",
        "shape": shape,
        "num_replicas": NUM_REPLICAS,
        "num_moves_median": statistics.median(num_moves),
        "median_ms": round(statistics.median(taken_ms), 3),
        "max_ms": round(max(taken_ms), 3),
    }


def _tails(shape: str, chance: random.Random) -> list[Replica]:
    """`nothing_fits`: every pair holds too much KV, or too many trajectories, the more of the one the less of other."""
    replicas: list[Replica] = []
    for index in range(NUM_REPLICAS):
        share = index / (NUM_REPLICAS - 1)
        packed = shape == "nothing_fits"
        num_held = (33 + int(30 * (1 - share)) if share < 1 else 1) if packed else chance.randrange(1, 64)
        replica = Replica(ReplicaId(index), MachineId(index // 2), heard_at_s=0.0, started=True, version=0)
        replica.version = chance.randrange(4) if shape == "versions" else 0
        replica.kv_capacity_tokens, replica.decode_batch_max = 790_000, 64
        replica.kv_utilization = 0.2 + 0.7 * share if packed else chance.random()
        replica.in_tail = True
        replica.trajectories = dict.fromkeys(TrajectoryId(100 * index + held) for held in range(num_held))
        replicas.append(replica)
    return replicas


def _config(schedule: ScheduleConfig) -> Config:
    """128 machines with 2 replicas of 4 GPUs each; a step is 1,024 prompts of 16, twice the Laminar paper's."""
    unused = Path("unused")
    return Config(
        model=ModelConfig(path=unused),
        data=DataConfig(train_files=(unused,), val_files=(unused,), response_tokens_max=16_384),
        batch=BatchConfig(num_prompts_per_step=1024, group_size=16, num_mini_batches=16),
        buffer=BufferConfig(capacity_steps=5),
        schedule=schedule,
        rollout=RolloutConfig(num_replicas=NUM_REPLICAS, num_groups_per_replica_max=8),
        evaluation=EvaluationConfig(interval_steps=4, num_prompts_max=512),
        checkpoint=CheckpointConfig(interval_steps=2),
        cluster=ClusterConfig(num_machines=NUM_MACHINES),
    )


def _spread(us: list[float]) -> dict[str, float | int]:
    ordered = sorted(us)
    return {
        "num_events": len(ordered),
        "p50_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "max_us": round(ordered[-1], 1),
    }


def _print(result: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    by_event = result.pop("by_event", None)
    print("  ".join(f"{name}={value}" for name, value in result.items()), flush=True)
    if isinstance(by_event, dict):
        for kind, spread in by_event.items():
            print(f"    {kind:22} " + "  ".join(f"{name}={value}" for name, value in spread.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
