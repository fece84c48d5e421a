import json
from pathlib import Path

import pytest

from laminar.observe.metrics import MetricsRow
from laminar.observe.summary import Summary, read_summary, summarize, write_summary
from tests.observe.recorded_run import RecordedRun, small_config

PROMISED = {
    "heldout_accuracy_first",
    "heldout_accuracy_last",
    "train_s",
    "num_steps",
    "num_trajectories_trained",
    "num_trajectories_lost",
    "num_refreshes",
    "num_repack_moves",
    "staleness_at_finish",
    "trajectory_spans_max",
    "tokens_per_s",
    "idle_ratio",
    "peak_pss_bytes",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = RecordedRun(tmp_path_factory.mktemp("run"), small_config(num_steps=8))
    run.world.fail_share = 0.02
    run.go()
    return run


def test_the_file_has_every_promised_key(run: RecordedRun):
    written = json.loads((run.run_dir / "summary.json").read_text())
    assert set(written) >= PROMISED
    assert set(written["idle_ratio"]) == {"replicas", "trainer"}
    assert written["num_steps"] == 8
    assert written["failed"] is False
    assert read_summary(run.run_dir) == read_summary(run.run_dir)


def test_it_adds_up_with_the_ledger(run: RecordedRun):
    summary = read_summary(run.run_dir)
    assert summary is not None
    ledger = run.plane.state.ledger
    assert summary.num_trajectories_trained == ledger.trained == sum(summary.trained_by_version.values())
    assert summary.dropped == ledger.dropped
    assert summary.num_trajectories_lost == sum(ledger.dropped.values()) > 0
    assert summary.tokens_per_s * summary.train_s == pytest.approx(
        sum(step.lengths.num_tokens for step in run.history.steps)
    )


def test_groups_that_the_filter_dropped_are_not_lost(run: RecordedRun):
    state = run.plane.state
    before = state.ledger.dropped
    state.ledger.dropped = {"equal_rewards": 40, "environment": 2}
    summary = summarize(small_config(), run.history, state, [], peak_pss_bytes=None)
    state.ledger.dropped = before
    assert summary.num_trajectories_lost == 2
    assert summary.dropped == {"equal_rewards": 40, "environment": 2}


def test_spans_are_the_largest_that_the_trainer_found(run: RecordedRun):
    name = "training/off_policy/trajectory_spans/max"
    rows = [MetricsRow(1, 0.0, {name: 1.0}), MetricsRow(2, 0.0, {name: 3.0}), MetricsRow(3, 0.0, {name: None})]
    assert summary_of(run, rows).trajectory_spans_max == 3
    assert summary_of(run, []).trajectory_spans_max is None


def test_a_run_that_trained_nothing_has_a_summary(tmp_path: Path):
    run = RecordedRun(tmp_path, small_config())
    run.go(stop_after=3)
    summary = summary_of(run, [])
    assert (summary.num_steps, summary.train_s, summary.tokens_per_s) == (0, 0.0, 0.0)
    assert summary.heldout_accuracy_last is None
    assert read_summary(tmp_path) is None
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is no summary"):
        read_summary(tmp_path)


def summary_of(run: RecordedRun, rows: list[MetricsRow]) -> Summary:
    return summarize(small_config(), run.history, run.plane.state, rows, peak_pss_bytes=None)
