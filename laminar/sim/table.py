"""Draws what simulated runs came to as a table: a column for each run."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from laminar.sim.outcome import Outcome, Spread

ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("GPUs: trainer + replicas", lambda o: _split(o)),
    ("tokens/s trained", lambda o: f"{o.tokens_per_s:,.0f}"),
    ("tokens/s generated", lambda o: f"{o.generation_tokens_per_s:,.0f}"),
    ("step, s", lambda o: f"{o.step_s:,.1f}"),
    ("trainer computes / idle", lambda o: f"{o.training:.0%} / {o.trainer_idle:.0%}"),
    ("replicas generate / idle", lambda o: f"{o.generating:.0%} / {o.replicas_idle:.0%}"),
    ("KV utilization", lambda o: f"{o.kv_utilization:.1%}"),
    ("trajectory, s: mean, p50", lambda o: _pair(o.trajectory_latency_s.mean, o.trajectory_latency_s.p50)),
    ("trajectory, s: p99, max", lambda o: _pair(o.trajectory_latency_s.p99, o.trajectory_latency_s.max)),
    ("staleness at finish", lambda o: _shares(o.staleness_at_finish)),
    ("staleness at training", lambda o: _shares(o.staleness_at_train)),
    ("repack moves a step", lambda o: f"{o.num_repack_moves / o.num_steps:.1f}"),
    ("preemptions a step", lambda o: f"{o.num_preemptions / o.num_steps:,.0f}"),
    ("wait for weights, s: mean, max", lambda o: _wait(o.wait_for_weights_s)),
)


def comparison(outcomes: Sequence[Outcome]) -> Table:
    first = outcomes[0]
    table = Table(box=box.SIMPLE_HEAD, title=f"{first.num_gpus} GPUs, {first.num_steps} steps measured")
    table.add_column("")
    for shown in outcomes:
        table.add_column(shown.schedule, justify="right", no_wrap=True)
    for name, text in ROWS:
        table.add_row(name, *(text(shown) for shown in outcomes))
    return table


def _split(shown: Outcome) -> str:
    return (
        f"all {shown.num_gpus}, in turns" if shown.colocated else f"{shown.num_train_gpus} + {shown.num_rollout_gpus}"
    )


def _pair(one: float, other: float) -> str:
    return f"{one:,.0f}, {other:,.0f}"


def _wait(spread: Spread) -> str:
    return f"{spread.mean:.2f}, {spread.max:.2f}"


def _shares(shares: dict[int, float]) -> str:
    return "\n".join(f"{value}: {share:.0%}" for value, share in shares.items()) or "-"
