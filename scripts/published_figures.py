"""Simulates what the Laminar paper shows beside its throughput: `python -m scripts.published_figures [NAME …]`.

repack      Table 1 and figure 16: 32B on 128 GPUs, repack on and off
floor       the step that more GPUs do not make shorter: 32B, one_step_stale
fault       figure 15: two of 16 replicas lost for 252 s
staleness   figure 10: 7B on 64 GPUs, 256 trajectories a replica
waits       figure 14: how long a replica waits for weights
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from laminar.config import Config
from laminar.control.messages import MachineId
from laminar.sim.faults import KillMachine
from laminar.sim.links import global_broadcast_s
from laminar.sim.outcome import outcome
from laminar.sim.published import published
from laminar.sim.run import Simulated, simulate
from laminar.sim.series import Cell, cells, config_of


def main(names: list[str]) -> int:
    for name in names or list(FIGURES):
        print(f"{name}:")
        for line in FIGURES[name]():
            print(f"  {line}", flush=True)
    return 0


def repack() -> Iterator[str]:
    """The mean over the measured steps, as the paper's is over its run."""
    base = config_of(_cell("32B_math", "trajectory_level", 128), num_steps=20, num_warmup_steps=5)
    on, off = (outcome(simulate(_with(base, "repack", enabled=enabled))) for enabled in (True, False))
    said = published().repack_32b_128
    ratio = said.generation_tokens_per_s.on / said.generation_tokens_per_s.off
    yield _beside("generated, tokens/s, on", on.generation_tokens_per_s, said.generation_tokens_per_s.on)
    yield _beside("generated, tokens/s, off", off.generation_tokens_per_s, said.generation_tokens_per_s.off)
    yield _beside("on / off", on.generation_tokens_per_s / off.generation_tokens_per_s, ratio)
    yield _beside("KV utilization on, %", 100 * on.kv_utilization, 100 * said.kv_utilization.on)
    yield _beside("KV utilization off, %", 100 * off.kv_utilization, 100 * said.kv_utilization.off)
    yield _beside("mean latency on, s", on.trajectory_latency_s.mean, said.latency_mean_s.on)
    yield _beside("mean latency off, s", off.trajectory_latency_s.mean, said.latency_mean_s.off)
    yield _beside("longest latency on, s", on.trajectory_latency_s.max, said.latency_max_s.on)
    yield _beside("longest latency off, s", off.trajectory_latency_s.max, said.latency_max_s.off)


def floor() -> Iterator[str]:
    for num_gpus, said_s in ((256, 439.0), (512, 439.0)):
        ran = outcome(simulate(config_of(_cell("32B_math", "one_step_stale", num_gpus))))
        yield _beside(f"step on {num_gpus} GPUs, s", ran.step_s, said_s)


def fault() -> Iterator[str]:
    said = published().fault_32b_128
    base = config_of(
        _cell("32B_math", "trajectory_level", 128), num_steps=12, num_warmup_steps=1, replica_start_s=said.outage_s
    )
    whole, struck = simulate(base), simulate(base, faults=[KillMachine(said.lost_at_s, MachineId(3))])
    counters = struck.state.counters
    yield (
        f"replicas lost {counters.num_replicas_lost}, trajectories rescued {counters.num_trajectories_rescued}, "
        f"restarted {counters.num_trajectories_restarted}, dropped {sum(struck.state.ledger.dropped.values())}"
    )
    lost_s, back_s = said.lost_at_s, said.lost_at_s + said.outage_s
    for name, ran in (("undisturbed", whole), ("struck", struck)):
        yield f"generated while they are gone, {name}: {_generated(ran, lost_s, back_s):,.0f} tokens/s"
        yield f"steps, {name}: " + ", ".join(f"{at_s:.0f} s {rate:,.0f}" for at_s, rate in _steps(ran))
    yield "steps, published: " + ", ".join(f"{at_s:.0f} s {rate:,.0f}" for at_s, rate in said.trained)


def staleness() -> Iterator[str]:
    base = config_of(_cell("7B_math", "trajectory_level", 64), num_steps=30, num_warmup_steps=5)
    ours = outcome(simulate(_with(base, "rollout", num_groups_per_replica_max=16))).staleness_at_finish
    halves = [by for hour, by in published().staleness_at_finish_percent.items() if hour > 0]
    for value in sorted({*ours, *halves[0]}):
        said = sum(by.get(value, 0.0) for by in halves) / len(halves)
        yield _beside(f"staleness {value}, %", 100 * ours.get(value, 0.0), said)


def waits() -> Iterator[str]:
    for size, series, weight_bytes in (("32B", "32B_math", 65.5e9), ("72B", "72B_math", 145.4e9)):
        said = published().wait_for_weights_s[size]
        for num_rollout_gpus, mean_s in said.mean.items():
            cell = Cell(series, "trajectory_level", 2 * num_rollout_gpus, 1.0, fitted=False)
            ran = outcome(simulate(config_of(cell, num_train_gpus=num_rollout_gpus, num_steps=8, num_warmup_steps=2)))
            yield _beside(f"{size} to {num_rollout_gpus} GPUs, mean s", ran.wait_for_weights_s.mean, mean_s)
            everybody_s = global_broadcast_s(published(), weight_bytes, num_rollout_gpus)
            yield f"{size} to {num_rollout_gpus} GPUs, all at once (published, not simulated): {everybody_s:.2f} s"


FIGURES: Mapping[str, Callable[[], Iterator[str]]] = {
    "repack": repack,
    "floor": floor,
    "fault": fault,
    "staleness": staleness,
    "waits": waits,
}


def _cell(series: str, schedule: str, num_gpus: int) -> Cell:
    return next(c for c in cells(series) if (c.schedule, c.num_gpus) == (schedule, num_gpus))


def _with(config: Config, section: str, **settings: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})


def _beside(name: str, ours: float, said: float) -> str:
    digits = 0 if abs(said) >= 1000 else 2
    return f"{name}: {ours:,.{digits}f}, published {said:,.{digits}f} ({ours / said - 1:+.1%})"


def _steps(ran: Simulated) -> Iterator[tuple[float, float]]:
    """(end, tokens/s) of each step but the first, whose begin is the run's."""
    steps = ran.measures.steps
    for before, step in pairwise(steps):
        yield step.at_s, step.num_tokens / (step.at_s - before.at_s)


def _generated(ran: Simulated, from_s: float, to_s: float) -> float:
    inside = [(at_s, num_tokens) for at_s, num_tokens in ran.measures.decoded if from_s <= at_s <= to_s]
    (begin_s, before), (end_s, after) = inside[0], inside[-1]
    return (after - before) / (end_s - begin_s)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
