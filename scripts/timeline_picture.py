"""Draws what replicas and trainer did in two runs, one above the other: docs/images/timeline.svg."""

import argparse
from pathlib import Path

from laminar.control.state import Phase, TrainerPhase
from laminar.observe.run_folder import RunFolder, read_run
from laminar.observe.timeline import Absence
from scripts.quickstart_runs import ROOT, RUNS

COLOURS = {
    Phase.GENERATING: ("#2166c8", "generating"),
    Phase.TAIL: ("#8db8f0", "generating, tail only"),
    Phase.REPACKED: ("#8e44ad", "being repacked"),
    Phase.LOADING: ("#12966a", "loading weights"),
    Phase.EVALUATING: ("#d24a95", "evaluating"),
    Phase.IDLE: ("#dcdcda", "idle"),
    Phase.STARTING: ("#f1e4c3", "starting"),
    Absence.LOST: ("#d32f2f", "lost"),
    Absence.DOWN: ("#ffffff", "down"),
    TrainerPhase.TRAINING: ("#e8772e", "training"),
    TrainerPhase.PUBLISHING: ("#12966a", "publishing"),
    TrainerPhase.SAVING: ("#6d4c41", "saving"),
    TrainerPhase.WAITING: ("#dcdcda", "waiting"),
    TrainerPhase.STARTING: ("#f1e4c3", "starting"),
}
SHOWN = (Phase.GENERATING, Phase.TAIL, Phase.LOADING, Phase.IDLE, TrainerPhase.TRAINING)
WINDOW_S = 12.0
BEGIN_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders, the upper one first")
    runs = parser.parse_args().runs or [RUNS / f"compare/{kind}-0" for kind in ("synchronous", "trajectory_level")]
    from matplotlib import pyplot  # only in the development environment
    from matplotlib.patches import Patch

    figure, panels = pyplot.subplots(len(runs), 1, figsize=(9, 1.9 * len(runs) + 0.5), sharex=True)
    for axes, folder in zip(panels, runs, strict=True):
        draw(axes, read_run(folder))
    panels[-1].set_xlabel("seconds")
    handles = [Patch(color=COLOURS[phase][0], label=COLOURS[phase][1]) for phase in SHOWN]
    figure.legend(handles=handles, loc="upper center", ncols=len(SHOWN), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    path = ROOT / "docs" / "images" / "timeline.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def draw(axes, run: RunFolder) -> None:  # noqa: ANN001  (matplotlib has no types)
    """One run's rows: its replicas, and the trainer below them."""
    history = run.history
    begin_s = (history.generating_since_s or 0.0) + BEGIN_S
    rows = [place.intervals for place in history.timeline.places] + [history.timeline.trainer]
    for row, intervals in enumerate(rows):
        for interval in intervals:
            start_s, end_s = max(interval.start_s, begin_s), min(interval.end_s, begin_s + WINDOW_S)
            if start_s < end_s:
                colour = COLOURS[interval.phase][0]
                axes.barh(-row, end_s - start_s, left=start_s - begin_s, height=0.82, color=colour, linewidth=0)
    axes.set_yticks([-row for row in range(len(rows))])
    axes.set_yticklabels([f"replica {i}" for i in range(len(rows) - 1)] + ["trainer"])
    axes.set_xlim(0, WINDOW_S)
    num_steps = sum(begin_s <= step.ended_at_s < begin_s + WINDOW_S for step in history.steps)
    axes.set_title(f"{run.summary.schedule}: {num_steps} steps in {WINDOW_S:g} s", loc="left", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
