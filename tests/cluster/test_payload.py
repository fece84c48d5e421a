"""What control knows by id is what the pools hold, also after a crash."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.cluster.payload import Payload
from laminar.control.messages import CommandId, Released, ReplicaId, TrajectoryId
from laminar.control.state import ClusterState
from laminar.control.trajectory_state import Segment, Trajectory, TrajectoryState
from laminar.data.records import Response, ScoringTask, WorkerReport
from tests.cluster.reported import assignment, delta, finished, open_payload, order, report, score, store_all

ROOT = Path(__file__).parents[2]


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Payload]:
    payload = open_payload(tmp_path / "journal.sqlite")
    yield payload
    payload.close()


def response_of(payload: Payload, id: int) -> tuple[int, ...]:
    (task,) = payload.scoring_tasks([assignment(id)], evaluation=False)
    return task.response_token_ids


# -------------------------------------------------------------------------------------------------------------- tasks


def test_a_task_has_exactly_the_tokens_that_control_counts(payload):
    """The replica's last report came after control had counted; what it had beyond is sampled again."""
    payload.tasks([assignment(1)], evaluation=False)
    payload.store(report(delta(1, 0, [7, 8, 9])))
    (task,) = payload.tasks([assignment(1, attempt=1, num_tokens=2)], evaluation=False)
    assert (task.attempt, task.response_token_ids, task.loss_mask) == (1, (7, 8), (1, 1))
    assert task.prompt.token_ids == (100,)
    payload.store(report(delta(1, 3, [10])))
    assert response_of(payload, 1) == (7, 8), "the old attempt went on"
    payload.store(report(delta(1, 2, [11], attempt=1), finished=[finished(1, 3, attempt=1)]))
    score(payload, 1, attempt=1)
    (experience,) = payload.experiences(order(1))
    assert experience.response.token_ids == [7, 8, 11]


def test_control_can_count_no_token_that_the_pool_lacks(payload):
    payload.store(report(delta(1, 0, [7])))
    with pytest.raises(ValueError, match="trajectory 1 has 1 tokens, so it cannot be cut to 2"):
        payload.tasks([assignment(1, attempt=1, num_tokens=2)], evaluation=False)


def test_what_is_sampled_depends_on_the_run_s_seed_and_the_trajectory_alone(payload, tmp_path):
    def seeds(of: Payload, attempt: int) -> list[int]:
        return [t.seed for t in of.tasks([assignment(id, attempt=attempt) for id in range(8)], evaluation=False)]

    assert seeds(payload, 0) == seeds(payload, 1)
    assert len(set(seeds(payload, 0))) == 8
    other = open_payload(tmp_path / "other.sqlite", seed=12)
    assert not set(seeds(other, 0)) & set(seeds(payload, 0))
    other.close()


def test_held_out_prompts_are_another_pool_and_never_become_experience(payload):
    (task,) = payload.tasks([assignment(1)], evaluation=True)
    assert task.prompt.token_ids == (200,)
    payload.store(report(delta(1, 0, [7]), finished=[finished(1, 1)]))
    assert payload.scoring_tasks([assignment(1)], evaluation=True) == [
        ScoringTask(TrajectoryId(1), 0, (7,), task.prompt)
    ]
    score(payload, 1, evaluation=True)
    with pytest.raises(KeyError, match=r"\[1\] are not in the experience buffer"):
        payload.experiences(order(1))


# --------------------------------------------------------------------------------------------------- late and repeated


def test_a_report_that_comes_twice_changes_nothing(payload):
    payload.tasks([assignment(1)], evaluation=False)
    for _ in range(2):
        payload.store(report(delta(1, 0, [7, 8]), finished=[finished(1, 2)]))
    score(payload, 1)
    assert payload.experiences(order(1))[0].response.token_ids == [7, 8]


@pytest.mark.parametrize("late_first", [True, False], ids=["before the new one ended", "after"])
def test_a_late_finished_of_an_old_attempt_changes_nothing(payload, late_first):
    """A replica that was given up had come to its end, truncated; where the trajectory moved it ended otherwise."""
    payload.tasks([assignment(1)], evaluation=False)
    payload.store(report(delta(1, 0, [7, 8])))
    payload.tasks([assignment(1, attempt=1, num_tokens=1)], evaluation=False)
    late = report(delta(1, 2, [9]), finished=[finished(1, 3, truncated=True)])
    new = report(delta(1, 1, [18, 19, 20], attempt=1), finished=[finished(1, 4, attempt=1)])
    for one in (late, new) if late_first else (new, late):
        payload.store(one)
    score(payload, 1, attempt=1)
    (experience,) = payload.experiences(order(1))
    assert experience.response.token_ids == [7, 18, 19, 20]
    assert not experience.truncated


def test_the_second_of_two_scores_changes_nothing(payload):
    """The first came after its deadline and a second was asked for; an unsure reward may differ."""
    payload.tasks([assignment(1)], evaluation=False)
    payload.store(report(delta(1, 0, [7]), finished=[finished(1, 1)]))
    score(payload, 1, value=0.25)
    score(payload, 1, value=0.75)
    assert payload.experiences(order(1))[0].score == 0.25


def test_what_comes_late_for_a_forgotten_trajectory_changes_nothing(payload):
    payload.tasks([assignment(1)], evaluation=False)
    payload.store(report(delta(1, 0, [7]), finished=[finished(1, 1)]))
    score(payload, 1)
    payload.forget([TrajectoryId(1)])
    payload.store(report(delta(1, 0, [7]), finished=[finished(1, 1)]))
    score(payload, 1)
    with pytest.raises(KeyError, match=r"\[1\] are not in the experience buffer"):
        payload.experiences(order(1))
    assert response_of(payload, 1) == ()


def test_forgetting_one_leaves_the_others_and_one_never_known_is_no_error(payload):
    payload.tasks([assignment(id) for id in (1, 2)], evaluation=False)
    payload.store(report(delta(1, 0, [7]), delta(2, 0, [8]), finished=[finished(1, 1), finished(2, 1)]))
    score(payload, 1, 2)
    payload.forget([TrajectoryId(1), TrajectoryId(99)])
    assert [e.response.token_ids for e in payload.experiences(order(2))] == [[8]]


def test_only_reports_carry_payload(payload):
    payload.store(WorkerReport(Released(CommandId(1), ReplicaId(0)), ()))


# -------------------------------------------------------------------------------------------------------- after a crash


def state_of(**states: TrajectoryState) -> ClusterState:
    """What control's log says of the trajectories that `store_all` left: t1=SCORED says that it knows of the score."""
    state = ClusterState()
    for name, trajectory_state in states.items():
        id = int(name[1:])
        a = assignment(id)
        has_score = trajectory_state not in (TrajectoryState.FINISHED, TrajectoryState.QUEUED)
        state.trajectories[a.trajectory] = Trajectory(
            a.trajectory,
            a.group,
            a.prompt,
            evaluation=False,
            state=trajectory_state,
            replica=None,
            target=None,
            dispatched_at_s=0.0,
            segments=[Segment(0, 3)],
            attempt=int(id == 2),
            score=(0.5 if id == 1 else 1.0) if has_score else None,
        )
    return state


def killed_run(journal: Path) -> None:
    """A process that stored all and was killed with -9 before it closed anything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.reported", str(journal)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stored\n"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()


def test_after_kill_9_the_experiences_are_the_same(tmp_path):
    undisturbed = open_payload(tmp_path / "undisturbed.sqlite")
    store_all(undisturbed)
    killed_run(tmp_path / "journal.sqlite")
    restored = open_payload(tmp_path / "journal.sqlite")
    state = state_of(
        t1=TrajectoryState.BUFFERED, t2=TrajectoryState.SCORED, t3=TrajectoryState.FINISHED, t4=TrajectoryState.QUEUED
    )
    restored.restore(state)
    assert restored.experiences(order(1, 2)) == undisturbed.experiences(order(1, 2))
    moved = restored.experiences(order(2))[0]
    assert moved.response == Response([12, 42, 43], [-0.12, -0.42, -0.43], [1, 1, 1], [3, 3, 3])
    assert restored.experiences(order(1))[0].truncated
    # Finished and not scored yet: it is scored now, and goes on as if nothing had happened.
    for payload in (restored, undisturbed):
        score(payload, 3, value=0.125)
    assert restored.experiences(order(3)) == undisturbed.experiences(order(3))
    # Unfinished: control starts it again from its prompt, under the same seed.
    again = [p.tasks([assignment(4, attempt=1)], evaluation=False) for p in (restored, undisturbed)]
    assert again[0] == again[1]
    assert again[0][0].response_token_ids == ()
    for payload in (restored, undisturbed):
        payload.close()


def test_after_a_crash_what_control_does_not_know_of_is_forgotten_for_good(tmp_path):
    """A trajectory may have been dropped, by the log, before the journal heard of it."""
    journal = tmp_path / "journal.sqlite"
    killed_run(journal)
    restored = open_payload(journal)
    restored.restore(state_of(t1=TrajectoryState.BUFFERED))
    with pytest.raises(KeyError):
        restored.experiences(order(2))
    restored.store(report(delta(2, 3, [44], attempt=1)))
    assert response_of(restored, 2) == ()
    restored.close()
    again = open_payload(journal)
    again.restore(state_of(t1=TrajectoryState.BUFFERED))
    assert again.experiences(order(1))[0].response.token_ids == [11, 21, 31]
    assert response_of(again, 2) == ()
    again.close()


def test_a_score_that_the_journal_has_and_the_log_has_not_is_asked_for_again(tmp_path):
    """The process died between the two; control's word counts, since it names the scores that it decided by."""
    killed_run(tmp_path / "journal.sqlite")
    restored = open_payload(tmp_path / "journal.sqlite")
    restored.restore(state_of(t1=TrajectoryState.FINISHED))
    with pytest.raises(KeyError):
        restored.experiences(order(1))
    score(restored, 1, value=0.75)
    assert restored.experiences(order(1))[0].score == 0.75
    restored.close()
