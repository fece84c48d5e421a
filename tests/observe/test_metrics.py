import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from laminar.observe.metric_names import TOPICS, is_listed, metrics_page
from laminar.observe.metrics import MetricsWriter, merge_mini_batches, read_metrics
from tests.observe.recorded_run import RecordedRun, small_config


def test_values_come_back_and_what_is_not_finite_is_null(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(3, 12.5, {"actor/pg_loss": 0.25, "actor/grad_norm": math.nan, "actor/lr": math.inf})
    writer.close()
    (row,) = read_metrics(tmp_path)
    assert (row.step, row.now) == (3, 12.5)
    assert row.values == {"actor/pg_loss": 0.25, "actor/grad_norm": None, "actor/lr": None}


def test_an_unknown_name_is_refused(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match="actor/pg_los: no such metric"):
        writer.write(1, 0.0, {"actor/pg_los": 0.0})
    assert read_metrics(tmp_path) == []


def test_families_take_any_suffix_but_none():
    assert is_listed("reward/format")
    assert is_listed("val-core/heldout/reward/mean@1") and is_listed("val-core/heldout/pass@4")
    assert not is_listed("reward/")
    assert not is_listed("reward")


def test_names_are_listed_once():
    names = [metric.name for topic in TOPICS for metric in topic.metrics]
    assert len(names) == len(set(names))


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == metrics_page(), "run: python -m laminar.observe.metric_names"


def test_tensorboard_gets_the_finite_values(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, 0.0, {"actor/lr": 0.5, "actor/grad_norm": math.nan})
    writer.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert b"actor/lr" in path.read_bytes()
    assert b"actor/grad_norm" not in path.read_bytes()


def test_the_lines_of_undone_steps_are_taken_back_and_written_once(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        writer.write(step, float(step), {"actor/lr": step / 10})
    writer.undo(1)
    assert [row.step for row in read_metrics(tmp_path)] == [1]
    for step in (2, 3):
        writer.write(step, 10.0 + step, {"actor/lr": step / 100})
    writer.close()
    assert [(row.step, row.values["actor/lr"]) for row in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.02), (3, 0.03)]
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    values = [(event.step, event.value) for event in shown.Scalars("actor/lr")]
    assert values == [(1, pytest.approx(0.1)), (2, pytest.approx(0.02)), (3, pytest.approx(0.03))]


def test_mini_batches_merge_by_what_their_names_end_in():
    merged = merge_mini_batches(
        [
            {
                "critic/rewards/max": 1.0,
                "critic/rewards/min": 0.5,
                "actor/pg_loss": 1.0,
                "actor/num_updates_skipped": 1,
            },
            {
                "critic/rewards/max": 0.5,
                "critic/rewards/min": 0.0,
                "actor/pg_loss": 3.0,
                "actor/num_updates_skipped": 1,
            },
            {"actor/entropy": 0.7},
        ]
    )
    assert merged == {
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "actor/pg_loss": 2.0,
        "actor/num_updates_skipped": 2,
        "actor/entropy": 0.7,
    }


def test_control_metrics_of_a_run_agree_with_its_history(tmp_path: Path):
    run = RecordedRun(tmp_path, small_config())
    run.go()
    rows = [row for row in read_metrics(tmp_path) if "training/global_step" in row.values]
    assert [row.values["training/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, step in zip(rows, run.history.steps, strict=True):
        values = row.values
        assert values["perf/total_num_tokens"] == step.lengths.num_tokens
        assert values["training/off_policy/trajectory_staleness/max"] == max(step.staleness)
        assert values["perf/throughput"] == pytest.approx(step.lengths.num_tokens / values["perf/time_per_step"])
        parts = ("wait_for_batch", "update_actor", "publish_stall", "save_checkpoint")
        assert sum(values[f"timing_s/{part}"] or 0.0 for part in parts) == pytest.approx(
            values["timing_s/step"], abs=0.6 if step.step == 1 else 1e-9
        )
        assert 0.0 <= (values["rollout/idle_ratio"] or 0.0) <= 1.0
