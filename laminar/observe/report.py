"""Writes a run's report: one self-contained HTML page that says what came out and shows how it came about."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import msgspec

from laminar.observe import figures
from laminar.observe.figures import Figure
from laminar.observe.run_folder import RunFolder, read_run
from laminar.observe.summary import NUM_STEPS_OF_MEAN, REPORT_FILE, REWARD_REACHED, write_summary
from laminar.observe.timeline_figure import timeline

NUM_INCIDENTS_MAX = 400
UNKNOWN = "\N{EN DASH}"


class Section(msgspec.Struct, frozen=True):
    title: str
    introduction: str
    figures: list[Figure]


class Tile(msgspec.Struct, frozen=True):
    what: str
    value: str
    unit: str
    more: str


def write_report(run_dir: Path) -> Path:
    """Writes summary.json beside it. From the run's folder alone, also while it goes on and after a crash.

    Raises ValueError for a folder that no run wrote.
    """
    run = read_run(run_dir)
    write_summary(run_dir, run.summary)
    path = run_dir / REPORT_FILE
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(page(run), encoding="utf-8")
    unfinished.rename(path)
    return path


def page(run: RunFolder) -> str:
    sections = [
        Section("What it learned", "", figures.learning(run)),
        Section(
            "Who waited for whom",
            "A weight version is one publish of the trainer. A replica generates a batch of trajectories with one "
            "version and takes a newer one only between batches.",
            timeline(run),
        ),
        Section(
            "Staleness",
            "How old the weights were that a trajectory came from, in versions. It is measured, not bounded.",
            figures.staleness(run),
        ),
        Section("Lengths and throughput", "", [*figures.lengths(run), *figures.throughput(run)]),
    ]
    if small := figures.policy(run):
        sections.append(Section("How the policy moved", "The trainer's own measurements, one value a step.", small))
    drawn = [figure for section in sections for figure in section.figures]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(run.path.name)} · Laminar</title>",
            f"<style>{_asset('page.css')}</style></head><body><main>",
            *_header(run),
            *_tiles(run),
            *_sections(sections),
            *_evaluations(run),
            *_incidents(run),
            *_words(),
            *_settings(run),
            f'</main><script id="figures" type="application/json">{_json_in_html(drawn)}</script>',
            f"<script>{_plotly_js()}</script>",
            f"<script>{_asset('page.js')}</script></body></html>",
        ]
    )


def _header(run: RunFolder) -> Iterator[str]:
    config, summary = run.config, run.summary
    yield f"<h1>{escape(run.path.resolve().name)}</h1>"
    yield (
        '<p class="lead">Reinforcement learning of a language model with Laminar: '
        f"{config.rollout.num_replicas} replicas on {config.cluster.num_machines} "
        f"{'machine' if config.cluster.num_machines == 1 else 'machines'} generate trajectories while one trainer "
        "learns from those that are finished.</p>"
    )
    labels = [
        ("", f"schedule <b>{escape(config.schedule.kind)}</b>"),
        ("", f"model <b>{escape(str(config.model.path))}</b>"),
        ("", f"seed <b>{config.seed}</b>"),
        ("", f"repack <b>{'on' if config.repack.enabled else 'off'}</b>"),
    ]
    if summary.paced_profile:
        labels.append(("paced", f"paced as <b>{escape(summary.paced_profile)}</b>: engine steps take scaled time"))
    else:
        labels.append(("", "not paced: engine steps take the time they take"))
    if summary.failed:
        labels.append(("failed", f"failed: <b>{escape(summary.cause or '')}</b>"))
    yield '<div class="labels">'
    yield from (f'<span class="label {kind}">{text}</span>' for kind, text in labels)
    yield "</div>"
    yield from (f'<div class="note">{escape(note)}</div>' for note in run.notes)


def _tiles(run: RunFolder) -> Iterator[str]:
    summary, steps = run.summary, run.history.steps
    last = steps[-NUM_STEPS_OF_MEAN:]
    reward = sum(step.score_mean for step in last) / max(1, len(last))
    first_reward = steps[0].score_mean if steps else 0.0
    lost = summary.num_trajectories_lost
    saved = summary.num_trajectories_rescued
    tiles = [
        Tile(
            "Held-out accuracy",
            _number(summary.heldout_accuracy_last, 3),
            "",
            f"first {_number(summary.heldout_accuracy_first, 3)}" if summary.evaluations else "not measured",
        ),
        Tile(f"Reward, last {NUM_STEPS_OF_MEAN} steps", _number(reward, 3), "", f"first step {first_reward:.3f}"),
        Tile(
            f"Time to reward {REWARD_REACHED}",
            _number(summary.time_to_reward_0_8_s, 0),
            "s" if summary.time_to_reward_0_8_s is not None else "",
            f"mean of {NUM_STEPS_OF_MEAN} steps" if summary.time_to_reward_0_8_s is not None else "not reached",
        ),
        Tile("Training time", _number(summary.train_s, 0), "s", f"{summary.num_steps} steps"),
        Tile("Throughput", f"{summary.tokens_per_s:,.0f}", "", "tokens/s trained"),
        Tile("Trajectories trained", f"{summary.num_trajectories_trained:,}", "", f"{lost} lost"),
        Tile(
            "Staleness at finish",
            _number(_mean(summary.staleness_at_finish), 2),
            "",
            _most(summary.staleness_at_finish),
        ),
        Tile(
            "Staleness at train", _number(_mean(summary.staleness_at_train), 2), "", _most(summary.staleness_at_train)
        ),
        Tile("Replicas idle", f"{summary.idle_ratio.replicas:.0%}", "", "of their time up"),
        Tile("Trainer waiting", f"{summary.idle_ratio.trainer:.0%}", "", "of its time"),
        Tile("Refreshes", f"{summary.num_refreshes:,}", "", "newer weights taken"),
        Tile("Repack moves", f"{summary.num_repack_moves:,}", "", "tails moved away"),
        Tile("Replicas lost", f"{summary.num_replicas_lost}", "", f"{saved} rescued from them"),
        Tile("Peak memory", *_gibibytes(summary.peak_pss_bytes), "of all processes"),
    ]
    yield '<div class="tiles">'
    for tile in tiles:
        unit = f" <small>{tile.unit}</small>" if tile.unit else ""
        yield (
            f'<div class="tile"><div class="what">{tile.what}</div><div class="value">{tile.value}{unit}</div>'
            f'<div class="more">{tile.more}</div></div>'
        )
    yield "</div>"


def _sections(sections: Sequence[Section]) -> Iterator[str]:
    index = 0
    for section in sections:
        yield f"<h2>{section.title}</h2>"
        if section.introduction:
            yield f"<p>{section.introduction}</p>"
        yield '<div class="figures">'
        for figure in section.figures:
            yield (
                f'<figure class="{figure.width}"><h3>{figure.title}</h3><figcaption>{figure.caption}</figcaption>'
                f'<div id="figure-{index}" style="height:{figure.height_px}px"></div></figure>'
            )
            index += 1
        yield "</div>"


def _evaluations(run: RunFolder) -> Iterator[str]:
    records = run.summary.evaluations
    if not records:
        return
    asked = run.config.evaluation
    sizes = sorted({k for record in records for k in record.pass_at})
    yield "<h2>Held-out evaluations</h2>"
    yield (
        f"<p>avg@{asked.num_responses_per_prompt} is the mean score of all responses; pass@k how likely one of k "
        f"responses to a prompt scores {asked.pass_score_min:g} or more (an unbiased estimate).</p>"
    )
    titles = ["step", "version", "prompts", "responses", f"avg@{asked.num_responses_per_prompt}"]
    titles += [f"pass@{k}" for k in sizes]
    yield '<div class="table"><table><tr>' + "".join(f'<th class="number">{title}</th>' for title in titles) + "</tr>"
    for record in records:
        cells = [f"{record.step}", f"{record.version}", f"{record.num_prompts}", f"{record.num_scored}"]
        cells += [_number(value, 3) for value in (record.mean_score, *(record.pass_at.get(k) for k in sizes))]
        yield "<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
    yield "</table></div>"


def _incidents(run: RunFolder) -> Iterator[str]:
    history = run.history
    yield "<h2>Incidents</h2>"
    if not history.incidents:
        yield "<p>None: nothing was lost, dropped, retried or rescued.</p>"
        return
    yield "<p>What went wrong and what became of it; the same kind within one step is counted together.</p>"
    yield '<div class="table"><table><tr><th class="number">at</th><th class="number">step</th><th>what</th>'
    yield '<th class="number">count</th><th>which, why</th></tr>'
    begin_s = history.generating_since_s or 0.0
    for incident in history.incidents[:NUM_INCIDENTS_MAX]:
        yield (
            f'<tr><td class="number">{incident.at_s - begin_s:,.1f} s</td><td class="number">{incident.step}</td>'
            f'<td class="kind">{escape(incident.kind)}</td><td class="number">{incident.count}</td>'
            f"<td>{escape(incident.cause)}</td></tr>"
        )
    yield "</table></div>"
    if len(history.incidents) > NUM_INCIDENTS_MAX:
        yield f"<p>… and {len(history.incidents) - NUM_INCIDENTS_MAX} more: `laminar replay` reads them all.</p>"


_WORDS = (
    ("replica", "One serving copy of the policy. It generates a closed batch of trajectories at one weight version."),
    ("tail", "Nothing waits for the replica any more and its batch thins out: only long trajectories are left."),
    ("repacked", "Its long tail is moved to another replica of the same version, so that it is free for a new batch."),
    ("refresh", "A replica loads newer weights between two batches."),
    ("idle", "No work: the buffer is full, or the schedule makes it wait."),
    (
        "staleness",
        "The trainer's version minus the trajectory's, when it finished (at finish) or was trained (at train).",
    ),
    ("publish lag", "The newest version minus the one that a replica holds."),
    ("held-out accuracy", "Mean reward on problems that are never trained on, all answered with one version."),
)


def _words() -> Iterator[str]:
    yield "<h2>Words</h2><dl>"
    yield from (f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS)
    yield "</dl>"


def _settings(run: RunFolder) -> Iterator[str]:
    settings = msgspec.json.format(msgspec.json.encode(run.config.model_dump(mode="json")), indent=2).decode()
    yield f"<details><summary>All settings of this run</summary><pre>{escape(settings)}</pre></details>"
    yield (
        f"<footer>Written by `laminar report` from {escape(str(run.path))}: its event log, metrics.jsonl and "
        "summary.json. Times count from the first trajectory dispatched; the start-up took "
        f"{run.history.generating_since_s or 0.0:.1f} s.</footer>"
    )


def _json_in_html(value: object) -> str:
    # A script ends at the first `</`, wherever it stands.
    return msgspec.json.encode(value).decode().replace("</", "<\\/")


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    return get_plotlyjs()


def _asset(name: str) -> str:
    return (files("laminar.observe") / "page" / name).read_text(encoding="utf-8")


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _gibibytes(num_bytes: int | None) -> tuple[str, str]:
    return (UNKNOWN, "") if num_bytes is None else (f"{num_bytes / 2**30:.2f}", "GiB")


def _mean(histogram: dict[int, int]) -> float | None:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else None


def _most(histogram: dict[int, int]) -> str:
    return f"versions, at most {max(histogram)}" if histogram else "nothing yet"
