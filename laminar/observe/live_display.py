"""Draws a run on a terminal: where it stands, and a row for every replica."""

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laminar.config import Config
from laminar.control.state import ClusterState, Phase, TrainerPhase
from laminar.observe.display import Recent
from laminar.observe.history import History

REFRESH_INTERVAL_S = 0.5
UNKNOWN = "\N{EN DASH}"
NUM_INCIDENTS_SHOWN = 3
NUM_STEPS_SHOWN = 5
"""Steps over which reward, staleness and tokens/s are averaged."""

_COLORS: dict[str, str] = {
    Phase.STARTING: "yellow",
    Phase.LOADING: "cyan",
    Phase.GENERATING: "bright_blue",
    Phase.TAIL: "blue",
    Phase.REPACKED: "magenta",
    Phase.EVALUATING: "bright_magenta",
    Phase.IDLE: "bright_black",
    TrainerPhase.TRAINING: "yellow",
    TrainerPhase.PUBLISHING: "cyan",
    TrainerPhase.SAVING: "magenta",
    TrainerPhase.WAITING: "bright_black",
}


class LiveDisplay:
    """A table that is drawn anew at most twice a second, and at every step's end."""

    def __init__(self, config: Config, history: History, *, num_steps: int | None, output: TextIO) -> None:
        self._config = config
        self._history = history
        self._num_steps = num_steps
        self._console = Console(file=output)
        self._live: Live | None = Live(console=self._console, auto_refresh=False, redirect_stdout=True)
        self._live.start()
        self._shown_at_s = -REFRESH_INTERVAL_S
        self._num_steps_shown = 0

    def update(self, now: float, state: ClusterState, /) -> None:
        due = now - self._shown_at_s >= REFRESH_INTERVAL_S or len(self._history.steps) != self._num_steps_shown
        if self._live is None or not (due or state.ended):
            return
        self._shown_at_s, self._num_steps_shown = now, len(self._history.steps)
        try:
            self._live.update(render(self._config, self._history, self._num_steps, now, state), refresh=True)
        except Exception as error:  # noqa: BLE001 - a fault in what is only shown must not end what runs
            self.close()
            self._console.print(f"the display failed and is off; the run goes on ({type(error).__name__}: {error})")

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def render(config: Config, history: History, num_steps: int | None, now: float, state: ClusterState) -> RenderableType:
    paced = f" · paced as {config.paced.accelerator}" if config.paced else ""
    title = Text.assemble(("laminar ", "bold"), f"{config.run_dir} · {config.schedule.kind}{paced}")
    parts: list[RenderableType] = [title, _progress(history, num_steps, now, state), _numbers(history, now, state)]
    parts.append(_replicas(state))
    parts += [
        Text(f"{incident.kind}: {incident.cause}", style="yellow", overflow="ellipsis", no_wrap=True)
        for incident in history.incidents[-NUM_INCIDENTS_SHOWN:]
    ]
    return Group(*parts)


def _progress(history: History, num_steps: int | None, now: float, state: ClusterState) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    begin_s = history.generating_since_s
    elapsed = f"{now - begin_s:.0f} s" if begin_s is not None else "starting up"
    of = f" of {num_steps}" if num_steps else ""
    bar = ProgressBar(total=num_steps or 1, completed=state.trainer.step if num_steps else 0, width=40)
    row.add_row(f"step {state.trainer.step}{of}", bar, elapsed)
    return row


def _numbers(history: History, now: float, state: ClusterState) -> RenderableType:
    recent = Recent.of(history.steps[-NUM_STEPS_SHOWN:])
    evaluation = history.evaluations[-1] if history.evaluations else None
    trainer = state.trainer
    doing = f"{trainer.phase}" + (f" {trainer.index + 1}" * (trainer.phase == "training"))
    held_out = f"{evaluation.mean_score:.3f} (step {evaluation.step})" if evaluation else UNKNOWN
    begin_s = max(history.generating_since_s or now, now - 10.0)
    table = Table.grid(padding=(0, 3))
    table.add_row(
        _labelled("reward", f"{recent.reward:.3f}" if history.steps else UNKNOWN),
        _labelled("held-out", held_out),
        _labelled("staleness", f"{recent.staleness_mean:.1f}, at most {recent.staleness_max}"),
        _labelled("tokens/s", f"{history.tokens_per_s(begin_s, now):,.0f}"),
        _labelled("trainer", doing, _COLORS.get(trainer.phase, "")),
        _labelled("buffer", f"{len(state.buffer)} groups"),
    )
    return table


def _replicas(state: ClusterState) -> RenderableType:
    table = Table(box=None, header_style="bright_black", padding=(0, 1, 0, 0))
    for name in ("replica", "machine", "phase", "version", "KV utilization"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "trajectories"):
        table.add_column(name, justify="right")
    for replica in sorted(state.replicas.values(), key=lambda r: (r.machine, r.id)):
        behind = state.trainer.version - replica.version if replica.version is not None else 0
        version = UNKNOWN if replica.version is None else f"{replica.version}" + (f" (-{behind})" if behind else "")
        table.add_row(
            str(replica.id),
            str(replica.machine),
            Text(replica.phase, style=_COLORS[replica.phase]),
            version,
            _bar(replica.kv_utilization),
            str(replica.num_running),
            str(replica.num_waiting),
            str(len(replica.trajectories)),
        )
    return table


def _bar(share: float) -> Text:
    filled = round(min(1.0, share) * 10)
    return Text.assemble(("█" * filled, "bright_blue"), ("░" * (10 - filled), "bright_black"), f" {share:4.0%}")


def _labelled(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "bright_black"), (value, style))
