from pathlib import Path

import msgspec
import pytest

from laminar.control import manager
from laminar.observe.event_log import log_files, newest_segment, segments
from laminar.observe.replay import replay, restore
from tests.observe.recorded_run import RecordedRun, small_config


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path, small_config())
    run.world.kill(1, 3.0)
    run.world.fail_share = 0.01
    run.world.repeat_share = 0.05
    return run


def test_a_recorded_run_is_decided_the_same_again(run: RecordedRun):
    run.go()
    report = replay(run.run_dir)
    assert report.difference is None
    assert report.num_files == len(log_files(run.run_dir)) > 3
    assert report.num_events == sum(len(s.records) for s in segments(run.run_dir)) > 500
    assert report.num_commands == len(run.world.commands)
    assert not report.torn
    assert not report.other_code_versions
    assert report.text().endswith("files: identical")


def test_another_command_is_found_with_its_place(run: RecordedRun):
    run.go()
    path = log_files(run.run_dir)[1]
    lines = path.read_bytes().split(b"\n")
    number = next(i for i, line in enumerate(lines) if b'"Load"' in line)
    commands = msgspec.json.decode(lines[number])
    load = next(c for c in commands["commands"] if c["command_type"] == "Load")
    load["version"] += 1
    lines[number] = msgspec.json.encode(commands)
    path.write_bytes(b"\n".join(lines))
    difference = replay(run.run_dir).difference
    assert difference is not None
    assert f"{path}, line {number} differs" in replay(run.run_dir).text()
    assert (difference.file, difference.line) == (path, number)
    assert f'"version":{load["version"]}' in difference.recorded
    assert f'"version":{load["version"] - 1}' in difference.got


def test_another_state_in_a_snapshot_is_found(run: RecordedRun):
    run.go()
    path = log_files(run.run_dir)[2]
    header, _, rest = path.read_bytes().partition(b"\n")
    changed = msgspec.json.decode(header)
    changed["state"]["next_trajectory"] += 1
    path.write_bytes(msgspec.json.encode(changed) + b"\n" + rest)
    difference = replay(run.run_dir).difference
    assert difference is not None
    assert (difference.file, difference.line) == (path, 1)
    assert difference.recorded.startswith("next_trajectory")


def test_code_that_decides_otherwise_is_found(run: RecordedRun, monkeypatch: pytest.MonkeyPatch):
    run.go()
    monkeypatch.setattr(manager.Manager, "_is_loading", lambda *_: False)
    monkeypatch.setattr(manager.Manager, "_refill_exhausted", lambda *_: True)
    assert replay(run.run_dir).difference is not None


def test_a_killed_run_is_restored_as_it_was(run: RecordedRun):
    run.go(stop_after=731)
    restored = restore(run.run_dir)
    assert msgspec.json.encode(restored.state) == msgspec.json.encode(run.plane.state)
    assert restored.now == run.world.now


def test_the_clock_is_known_when_the_newest_file_has_no_event(run: RecordedRun):
    run.go(stop_after=600)
    assert not newest_segment(run.run_dir).records
    assert restore(run.run_dir).now == run.world.now


def test_an_event_without_its_commands_counts_as_handled(run: RecordedRun):
    run.go(stop_after=731)
    path = newest_segment(run.run_dir).path
    lines = path.read_bytes().split(b"\n")
    last = max(i for i, line in enumerate(lines) if line.startswith(b'{"commands"'))
    path.write_bytes(b"\n".join(lines[:last]) + b"\n")
    assert newest_segment(run.run_dir).records[-1].commands is None
    assert replay(run.run_dir).difference is None


def test_a_folder_without_a_log_is_refused(tmp_path: Path):
    for read in (replay, restore):
        with pytest.raises(ValueError, match="holds no event log"):
            read(tmp_path)


def test_a_run_with_settings_that_are_no_more_is_named_with_the_version_that_wrote_it(run: RecordedRun):
    run.go()
    path = log_files(run.run_dir)[0]
    header, *lines = path.read_bytes().split(b"\n")
    opening = msgspec.json.decode(header)
    opening["config"]["trainer"]["clip_ratio_low"] = 0.2
    path.write_bytes(b"\n".join([msgspec.json.encode(opening), *lines]))
    with pytest.raises(ValueError, match=r"was written by Laminar .*\(trainer\.clip_ratio_low\); use the version"):
        replay(run.run_dir)
