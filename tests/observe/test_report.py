import json
import re
from pathlib import Path
from typing import Any

import pytest

from laminar.config import EmbeddedEngineConfig, PacedConfig, SynchronousSchedule
from laminar.control.messages import AnyCommand, AnyEvent
from laminar.control.plane import ControlPlane
from laminar.observe.report import write_report
from laminar.observe.summary import read_summary
from tests.observe.recorded_run import RecordedRun, small_config


def figures_of(page: str) -> dict[str, Any]:
    """The figures' data by title, as the page's script reads them."""
    match = re.search(r'<script id="figures" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return {figure["title"]: figure for figure in json.loads(match.group(1))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    config = small_config(num_steps=12).model_copy(update={"engine": EmbeddedEngineConfig(paced=PacedConfig())})
    run = RecordedRun(tmp_path_factory.mktemp("run"), config)
    run.world.hang(2, 5.6)
    run.go()
    return run


@pytest.fixture(scope="module")
def page(run: RecordedRun) -> str:
    path = write_report(run.run_dir)
    assert path == run.run_dir / "report.html"
    assert path.stat().st_size < 6_000_000
    return path.read_text()


def test_the_page_needs_nothing_from_elsewhere(page: str):
    outside_plotly = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", outside_plotly)
    assert page.count("Plotly.react") >= 1


def test_a_paced_run_says_so_with_its_profile(page: str, tmp_path: Path):
    assert "paced as <b>h800-qwen2.5-32b-tp4</b>" in page
    other = RecordedRun(tmp_path, small_config(num_steps=2))
    other.go()
    assert "not paced" in write_report(tmp_path).read_text()


def test_every_figure_has_a_place_and_a_caption(page: str):
    figures = figures_of(page)
    assert len(figures) == page.count('<div id="figure-') == page.count("<figcaption>")
    assert all(figure["caption"].count(".") >= 1 for figure in figures.values())
    colors = set(re.findall(r'"(--[a-z-]+)"', json.dumps(figures)))
    assert {"--generating", "--training", "--first"} <= colors
    assert all(f"{color}:" in page for color in colors), "a colour that the style sheet does not have"


def test_every_phase_of_every_replica_is_on_the_timeline(run: RecordedRun, page: str):
    traces = figures_of(page)["Who did what when"]["data"]
    drawn_s: dict[str, float] = {}
    for trace in traces:
        for row, length in zip(trace["y"], trace["x"], strict=True):
            drawn_s[row] = drawn_s.get(row, 0.0) + (length if trace["type"] == "bar" else 0.0)
    end_s = run.history.timeline.end_s
    assert set(drawn_s) == {f"machine {i // 2} · replica {i}" for i in range(4)} | {"trainer"}
    assert all(total == pytest.approx(end_s, abs=0.1) for total in drawn_s.values())
    assert {t["name"] for t in traces} >= {"generating", "tail", "loading", "idle", "starting", "lost", "training"}


def test_the_histograms_are_those_of_the_run(run: RecordedRun, page: str):
    figures = figures_of(page)
    at_finish, at_train = figures["Staleness"]["data"]
    assert dict(zip(at_finish["x"], at_finish["y"], strict=True)) == run.plane.state.staleness_at_finish
    assert sum(at_train["y"]) == run.plane.state.ledger.trained
    assert sum(figures["Response lengths"]["data"][0]["y"]) == sum(run.history.lengths.values())


def test_a_loss_is_named_with_what_became_of_it(page: str):
    assert "replica 2 reported nothing for 2 s" in page
    assert "trajectories rescued" in page


@pytest.mark.parametrize("stop_after", [1, 40, 400])
def test_a_killed_run_has_a_report(tmp_path: Path, stop_after: int):
    run = RecordedRun(tmp_path, small_config())
    run.go(stop_after=stop_after)
    assert "has not ended, or was killed" in write_report(tmp_path).read_text()
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary.num_steps == run.plane.state.trainer.step


def test_the_summary_stays_the_same_when_the_report_is_written_again(run: RecordedRun):
    before = read_summary(run.run_dir)
    assert before is not None
    assert before.peak_pss_bytes == 3 * 2**30
    write_report(run.run_dir)
    assert read_summary(run.run_dir) == before


def test_an_event_that_control_cannot_take_does_not_hide_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RecordedRun(tmp_path, small_config())
    run.go()
    true_handle = ControlPlane.handle

    def handle(plane: ControlPlane, event: AnyEvent, now: float) -> list[AnyCommand]:
        assert now < 6.0, "no more"
        return true_handle(plane, event, now)

    monkeypatch.setattr(ControlPlane, "handle", handle)
    page = write_report(tmp_path).read_text()
    assert "control cannot take this event in (AssertionError: no more" in page
    trained = figures_of(page)["Learning against steps"]["data"][0]["x"]
    assert trained[:2] == [1, 2]


def test_a_synchronous_run_is_told_as_one(tmp_path: Path):
    config = small_config(num_steps=3).model_copy(update={"schedule": SynchronousSchedule()})
    RecordedRun(tmp_path, config).go()
    page = write_report(tmp_path).read_text()
    assert "All replicas begin together" in page
    assert figures_of(page)["Staleness"]["data"][1]["x"] == [0]


def test_what_the_user_named_cannot_break_the_page(tmp_path: Path):
    config = small_config(num_steps=1)
    evil = config.model.model_copy(update={"path": Path("</script><b>model")})
    RecordedRun(tmp_path, config.model_copy(update={"model": evil})).go()
    page = write_report(tmp_path).read_text()
    assert "</script><b>model" not in page


def test_a_folder_that_no_run_wrote_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no event log"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        write_report(tmp_path / "missing")
