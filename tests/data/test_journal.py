import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.control.messages import Finished, Score
from laminar.data.journal import Journal, JournalCorrupt, JournalInUse
from laminar.data.records import TokenDelta
from tests.data import journal_writer

START_S = 30.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "journal.sqlite"


def delta(start, ids, *, trajectory=7, attempt=0, version=3):
    return TokenDelta(trajectory, attempt, start, tuple(ids), (-0.25,) * len(ids), (1,) * len(ids), version)


def test_what_was_written_is_restored(path):
    with Journal(path) as journal:
        journal.append([delta(0, [1, 2]), delta(0, [9], trajectory=8)])
        journal.append([delta(2, [3])], [Finished(7, 0, 3, True)], [Score(7, 0, 0.5)])
    with Journal(path) as journal:
        restored = journal.restore()
    assert restored.partial.response(7).token_ids == [1, 2, 3]
    assert restored.partial.response(7).logprobs == [-0.25] * 3
    assert restored.partial.response(7).versions == [3] * 3
    assert restored.partial.response(8).token_ids == [9]
    assert restored.finished == {7: Finished(7, 0, 3, True)}
    assert restored.scores == {7: Score(7, 0, 0.5)}


def test_a_newer_attempt_is_restored_as_the_pool_had_it(path):
    with Journal(path) as journal:
        journal.append([delta(0, [1, 2]), delta(2, [3, 4])])
        journal.append([delta(3, [5, 6], attempt=1)])
        restored = journal.restore()
    assert restored.partial.response(7).token_ids == [1, 2, 3, 5, 6]
    assert restored.partial.attempt(7) == 1


def test_log_probs_come_back_bit_by_bit(path):
    logprobs = (-0.1, -1 / 3, -1e-17)
    with Journal(path) as journal:
        journal.append([TokenDelta(7, 0, 0, (1, 2, 3), logprobs, (1, 0, 1), 3)])
        response = journal.restore().partial.response(7)
    assert tuple(response.logprobs) == logprobs
    assert response.loss_mask == [1, 0, 1]


def test_marks_of_an_older_attempt_do_not_count(path):
    with Journal(path) as journal:
        journal.append([delta(0, [1])], [Finished(7, 1, 1, False)], [Score(7, 1, 1.0)])
        journal.append([delta(0, [1], attempt=1)])
        journal.append([], [Finished(7, 0, 9, False)], [Score(7, 0, 0.0)])
        journal.append([delta(0, [2], trajectory=8, attempt=2)], [Finished(8, 1, 1, False)], [Score(8, 1, 1.0)])
        restored = journal.restore()
    assert restored.finished == {7: Finished(7, 1, 1, False)}
    assert restored.scores == {7: Score(7, 1, 1.0)}


def test_a_forgotten_trajectory_is_not_restored(path):
    with Journal(path) as journal:
        for trajectory in (7, 8):
            journal.append(
                [delta(0, [1], trajectory=trajectory)], [Finished(trajectory, 0, 1, False)], [Score(trajectory, 0, 1.0)]
            )
        journal.forget([7, 99])
        journal.append([], [Finished(7, 0, 1, False)])
        restored = journal.restore()
    assert restored.partial.trajectories() == [8]
    assert list(restored.finished) == list(restored.scores) == [8]


def test_a_report_is_written_whole_or_not_at_all(path):
    with Journal(path) as journal:
        with pytest.raises(sqlite3.Error):
            journal.append([delta(0, [1])], [Finished(7, 0, 1, False)], [Score(7, 0, None)])  # pyright: ignore
        assert journal.restore().partial.trajectories() == []


def test_a_power_failure_cannot_tear_the_file(path):
    """Which no test can cause: a write-ahead log is what SQLite promises it for."""
    Journal(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.parametrize("num_reports", [1, 40, 300])
def test_kill_9_in_mid_stream_loses_nothing_acknowledged(path, num_reports):
    writer = subprocess.Popen(
        [sys.executable, journal_writer.__file__, str(path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        while (line := writer.stdout.readline()) and int(line) + 1 < num_reports:
            pass
    finally:
        writer.kill()
    acknowledged = int([line, *writer.stdout.readlines()][-1]) + 1
    assert writer.wait(START_S) == -signal.SIGKILL
    with Journal(path) as journal:
        restored = journal.restore()
    num_reports = restored.partial.num_tokens(0) // journal_writer.TOKENS_PER_DELTA
    assert num_reports in (acknowledged, acknowledged + 1)
    for trajectory in range(16):
        response = restored.partial.response(trajectory)
        positions = range(num_reports * journal_writer.TOKENS_PER_DELTA)
        assert response.token_ids == [journal_writer.token(trajectory, position) for position in positions]
    assert list(restored.finished) == list(restored.scores) == [1000 + report for report in range(num_reports)]


def test_a_second_process_is_refused_and_told_who_holds_it(path):
    with Journal(path):
        second = subprocess.run(
            [sys.executable, journal_writer.__file__, str(path)],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=START_S,
            check=False,
        )
        assert second.returncode != 0
        assert f"{path}: process {os.getpid()} is writing this journal" in second.stderr
        with pytest.raises(JournalInUse, match="give this one another run_dir"):
            Journal(path)
    Journal(path).close()


def test_a_killed_owner_leaves_no_lock(path):
    writer = subprocess.Popen(
        [sys.executable, journal_writer.__file__, str(path)], stdout=subprocess.PIPE, env=environment()
    )
    writer.stdout.readline()
    with pytest.raises(JournalInUse, match=f"process {writer.pid} "):
        Journal(path)
    writer.kill()
    writer.wait(START_S)
    writer.stdout.close()
    Journal(path).close()


def test_the_file_stops_growing_as_trajectories_are_forgotten(path):
    sizes = []
    with Journal(path) as journal:
        for step in range(12):
            ids = range(step * 50, step * 50 + 50)
            for report in range(20):
                journal.append([delta(report * 20, range(20), trajectory=id) for id in ids])
            journal.forget(ids)
            sizes.append(journal.num_bytes())
    assert sizes[-1] <= 1.2 * max(sizes[:6])
    assert path.stat().st_size < 3 * 2**20


@pytest.mark.parametrize("damage", ["no database", "middle", "cut short", "another layout", "a foreign database"])
def test_a_damaged_file_is_named_with_what_to_do(path, damage):
    with Journal(path) as journal:
        for report in range(200):
            journal.append([delta(report * 20, range(20), trajectory=id) for id in range(8)])
    content = bytearray(path.read_bytes())
    match damage:
        case "no database":
            path.write_bytes(b"not a database at all" * 1000)
        case "middle":
            content[8192 : len(content) // 2] = bytes(len(content) // 2 - 8192)
            path.write_bytes(content)
        case "cut short":
            path.write_bytes(content[: len(content) // 2])
        case "another layout":
            connection = sqlite3.connect(path)
            connection.execute("PRAGMA user_version=99")
            connection.close()
        case "a foreign database":
            path.unlink()
            connection = sqlite3.connect(path)
            connection.execute("CREATE TABLE users (name)")
            connection.close()
    with pytest.raises(JournalCorrupt, match="not a readable journal") as caught:
        Journal(path)
    assert str(path) in str(caught.value)
    assert "move it away" in str(caught.value)
    path.unlink()
    Journal(path).close()  # the lock was given back, too


def test_tokens_with_a_hole_are_corruption(path):
    with Journal(path) as journal:
        journal.append([delta(5, [1])])
        with pytest.raises(JournalCorrupt, match="trajectory 7, attempt 0: tokens 0 to 4 never came"):
            journal.restore()


def test_200_reports_a_second_of_16_deltas_are_sustained(path):
    with Journal(path) as journal:
        begun = time.perf_counter()
        for report in range(400):
            journal.append([journal_writer.delta(trajectory, report) for trajectory in range(16)])
        assert 400 / (time.perf_counter() - begun) >= 200


def environment():
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
