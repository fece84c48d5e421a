from itertools import pairwise
from pathlib import Path

import pytest

from laminar.control.recovery import recover
from laminar.observe.replay import replay, restore
from laminar.observe.run_folder import read_run
from laminar.observe.summary import time_to_reward_s
from tests.observe.recorded_run import RecordedRun, small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """With a killed and a hung replica, failures, and repeated messages."""
    run = RecordedRun(tmp_path_factory.mktemp("run"), small_config(num_steps=10))
    run.world.kill(1, 3.0)
    run.world.hang(2, 6.0)
    run.world.fail_share = 0.002
    run.world.repeat_share = 0.1
    run.world.late_share = 0.1
    run.go()
    return run


def test_every_step_is_recorded_with_what_it_trained(run: RecordedRun):
    steps = run.history.steps
    assert [step.step for step in steps] == list(range(1, 11))
    assert all(step.num_groups == 8 for step in steps)
    assert all(sum(s.staleness.values()) == s.lengths.num_trajectories <= 32 for s in steps)
    together: dict[int, int] = {}
    for step in steps:
        for staleness, count in step.staleness.items():
            together[staleness] = together.get(staleness, 0) + count
    assert together == run.plane.state.staleness_at_train
    assert all(a.ended_at_s == b.started_at_s for a, b in pairwise(steps))
    assert sum(s.num_repack_moves for s in steps) <= run.plane.state.counters.num_repack_moves


def test_a_length_is_counted_once_for_every_trajectory_that_finished(run: RecordedRun):
    assert run.plane.state.counters.num_late_messages > 0
    assert sum(run.history.lengths.values()) == sum(run.plane.state.staleness_at_finish.values())


def test_every_token_of_a_finished_trajectory_is_counted(run: RecordedRun):
    num_finished = sum(length * count for length, count in run.history.lengths.items())
    assert sum(run.history.tokens_by_second.values()) >= num_finished
    begin_s, end_s = 2, 9
    whole = sum(run.history.tokens_by_second.get(second, 0) for second in range(begin_s, end_s))
    assert run.history.tokens_per_s(begin_s, end_s) == pytest.approx(whole / (end_s - begin_s))


def test_losses_and_what_became_of_them_are_incidents(run: RecordedRun):
    kinds = [(incident.kind, incident.cause) for incident in run.history.incidents]
    assert ("replica lost", "replica 1 killed") in kinds
    assert any(kind == "replica lost" and "replica 2 reported nothing" in cause for kind, cause in kinds)
    rescued = sum(i.count for i in run.history.incidents if i.kind == "trajectories rescued")
    assert rescued == run.plane.state.counters.num_trajectories_rescued
    dropped = sum(i.count for i in run.history.incidents if i.kind == "trajectories dropped")
    assert dropped == sum(run.plane.state.ledger.dropped.values())


def test_evaluations_are_recorded_as_they_end(run: RecordedRun):
    ended = [(e.step, e.mean_score) for e in run.plane.state.evaluations if e.ended]
    assert sorted((r.step, r.mean_score) for r in run.history.evaluations) == sorted(ended)
    assert all(r.handed_over_at_s < r.ended_at_s for r in run.history.evaluations)
    for record in run.history.evaluations:
        assert record.num_prompts == run.plane.config.evaluation.num_prompts_max
        assert record.num_scored == record.num_prompts * run.plane.config.evaluation.num_responses_per_prompt
        # The world scores 1 or 0, so that the share that passes is the mean.
        assert record.pass_at[1] == pytest.approx(record.mean_score)
        assert list(record.pass_at.values()) == sorted(record.pass_at.values())


def test_a_folder_tells_the_same_history_as_the_live_run(run: RecordedRun):
    read = read_run(run.run_dir)
    live = run.history
    assert read.history.steps == live.steps
    assert read.history.evaluations == live.evaluations
    assert read.history.incidents == live.incidents
    assert read.history.lengths == live.lengths
    assert read.history.timeline.places == live.timeline.places
    assert read.history.timeline.trainer == live.timeline.trainer
    assert read.notes == []


def test_a_killed_run_is_read_up_to_its_last_event(tmp_path: Path):
    run = RecordedRun(tmp_path, small_config())
    run.go(stop_after=500)
    read = read_run(tmp_path)
    assert read.history.steps == run.history.steps
    assert read.summary.failed is None
    assert any("has not ended" in note for note in read.notes)


def test_a_resumed_run_is_one_run_without_the_steps_that_were_rolled_back(tmp_path: Path):
    first = RecordedRun(tmp_path, small_config(num_steps=8))
    first.go(until_step=5)
    state = restore(tmp_path).state
    recover(state, step=4)
    second = RecordedRun(tmp_path, small_config(num_steps=8), resumed=state)
    second.go()
    read = read_run(tmp_path)
    assert [step.step for step in read.history.steps] == list(range(1, 9))
    assert read.history.steps[:4] == first.history.steps[:4]
    assert [record.step for record in read.summary.evaluations] == [0, 2, 4, 6, 8]
    assert sum(i.kind == "resumed" for i in read.history.incidents) == 1
    times = [step.ended_at_s for step in read.history.steps]
    assert times == sorted(times)
    for place in read.history.timeline.places:
        assert all(a.end_s == b.start_s for a, b in pairwise(place.intervals))
    assert read.summary.num_trajectories_trained == 8 * 32
    assert replay(tmp_path).difference is None


def test_a_lost_trainer_s_steps_are_undone_in_history_and_metrics_and_done_again(tmp_path: Path):
    run = RecordedRun(tmp_path, small_config(num_steps=8))
    run.world.kill_trainer(7.0)
    run.go()
    history = run.history
    assert [step.step for step in history.steps] == list(range(1, 9))
    (undone,) = [incident for incident in history.incidents if incident.kind == "steps undone"]
    (lost,) = [incident for incident in history.incidents if incident.kind == "trainer lost"]
    assert undone.count >= 1
    assert lost.cause == "rank 1: killed"
    assert [record.step for record in history.evaluations] == [0, 2, 4, 6, 8]
    times = [step.ended_at_s for step in history.steps]
    assert times == sorted(times)
    read = read_run(tmp_path)
    assert read.history.steps == history.steps
    assert read.history.evaluations == history.evaluations
    assert read.summary.num_trainers_lost == 1
    assert replay(tmp_path).difference is None


def test_time_to_reward_is_that_of_the_first_five_steps_whose_mean_reaches_it(run: RecordedRun):
    steps = run.history.steps
    assert time_to_reward_s(steps, 0.0, 2.0) is None
    assert time_to_reward_s(steps[:4], 0.0, 0.0) is None
    assert time_to_reward_s(steps, 1.0, 0.0) == steps[4].ended_at_s - 1.0
    means = [sum(s.score_mean for s in steps[i - 5 : i]) / 5 for i in range(5, 11)]
    best = means.index(max(means))
    assert time_to_reward_s(steps, 0.0, max(means)) == steps[best + 4].ended_at_s
