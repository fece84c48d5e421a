"""Sums a simulated run up: what it came to over its measured steps, those after the warm-up."""

from collections.abc import Iterable

import msgspec

from laminar.sim.measures import StepEnd
from laminar.sim.run import Simulated


class Spread(msgspec.Struct, frozen=True):
    """How values spread; all zero when there are none."""

    mean: float
    p50: float
    p99: float
    max: float


class Outcome(msgspec.Struct, frozen=True):
    """Shares are of the measured seconds, between 0 and 1. Histograms: staleness → share of the trajectories."""

    schedule: str
    colocated: bool
    """Whether trainer and replicas took turns on all GPUs."""
    num_gpus: int
    num_train_gpus: int
    num_rollout_gpus: int
    num_replicas: int
    num_steps: int
    """Those measured."""
    tokens_per_s: float
    """Prompt and response tokens trained a second, as the papers count throughput."""
    generation_tokens_per_s: float
    """Response tokens decoded a second, by all replicas."""
    step_s: float
    """From the end of a step's last update to that of the next."""
    training: float
    """Share of the time in which the trainer computes."""
    trainer_idle: float
    """The rest: it waits for experience, or hands weights over."""
    generating: float
    """Share of the replicas' time in which they decode or take in prompts."""
    replicas_idle: float
    """The rest: without work, loading, or lost."""
    kv_utilization: float
    """Of the KV capacity of all replicas, idle time included."""
    trajectory_latency_s: Spread
    """From dispatch to the last token, of the trajectories that finished in this time."""
    staleness_at_finish: dict[int, float]
    staleness_at_train: dict[int, float]
    num_repack_moves: int
    num_preemptions: int
    wait_for_weights_s: Spread
    """Of the loads of this time: from when the replica could have used the weights to when it had them."""
    num_events: int
    """That control handled in the whole run."""


def outcome(run: Simulated) -> Outcome:
    """Raises ValueError for a run that ended before a step was measured."""
    shape, first, last = run.shape, *_measured(run)
    seconds, num_steps = last.at_s - first.at_s, len(run.measures.steps) - run.config.simulation.num_warmup_steps
    replica_s = seconds * shape.num_replicas
    num_kv_tokens = shape.num_kv_blocks * run.config.simulation.block_tokens
    records = [step for step in run.history.steps if step.step > run.config.simulation.num_warmup_steps]
    training = (last.training_s - first.training_s) / seconds
    generating = (last.usage.busy_s - first.usage.busy_s) / replica_s
    return Outcome(
        schedule=run.config.schedule.kind,
        colocated=shape.split.colocated,
        num_gpus=run.config.simulation.num_gpus,
        num_train_gpus=shape.split.num_train_gpus,
        num_rollout_gpus=shape.split.num_rollout_gpus,
        num_replicas=shape.num_replicas,
        num_steps=num_steps,
        tokens_per_s=sum(step.num_tokens for step in run.measures.steps[-num_steps:]) / seconds,
        generation_tokens_per_s=(last.usage.num_tokens - first.usage.num_tokens) / seconds,
        step_s=seconds / num_steps,
        training=training,
        trainer_idle=1 - training,
        generating=generating,
        replicas_idle=1 - generating,
        kv_utilization=(last.usage.kv_token_s - first.usage.kv_token_s) / replica_s / num_kv_tokens,
        trajectory_latency_s=spread(
            latency.seconds for latency in run.measures.latencies if first.at_s < latency.finished_at_s <= last.at_s
        ),
        staleness_at_finish=_shares(record.staleness_at_finish for record in records),
        staleness_at_train=_shares(record.staleness for record in records),
        num_repack_moves=sum(record.num_repack_moves for record in records),
        num_preemptions=last.usage.num_preemptions - first.usage.num_preemptions,
        wait_for_weights_s=spread(w.seconds for w in run.measures.waits if first.at_s < w.at_s <= last.at_s),
        num_events=run.num_events,
    )


def spread(values: Iterable[float]) -> Spread:
    ascending = sorted(values)
    if not ascending:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p99 = (ascending[int(share * (len(ascending) - 1))] for share in (0.5, 0.99))
    return Spread(sum(ascending) / len(ascending), p50, p99, ascending[-1])


def _measured(run: Simulated) -> tuple[StepEnd, StepEnd]:
    """The ends of the last warm-up step (with none: the run's begin) and of the last step."""
    steps, num_warmup = run.measures.steps, run.config.simulation.num_warmup_steps
    if len(steps) <= num_warmup:
        cause = run.ended.cause if run.ended is not None else "nothing more happened"
        raise ValueError(
            f"the simulated run made {len(steps)} of simulation.num_steps={run.config.simulation.num_steps} steps, of "
            f"which simulation.num_warmup_steps={num_warmup} are not measured: {cause}"
        )
    return (steps[num_warmup - 1] if num_warmup else run.measures.begin), steps[-1]


def _shares(histograms: Iterable[dict[int, int]]) -> dict[int, float]:
    counts: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            counts[value] = counts.get(value, 0) + count
    whole = sum(counts.values())
    return {value: count / whole for value, count in sorted(counts.items())}
