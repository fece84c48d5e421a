import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.control import messages as m
from laminar.control.state import ClusterState
from laminar.observe.event_log import EventLogWriter, log_files, segments
from tests.observe.recorded_run import small_config

COMMANDS = [m.Load(m.CommandId(1), m.ReplicaId(0), 3), m.EndRun(m.CommandId(2), False, "done")]
REPORT = m.ReplicaReport(
    m.ReplicaId(0),
    0.3,
    8,
    4,
    0,
    progress=tuple(m.Progress(m.TrajectoryId(i), 0, 100 + i) for i in range(8)),
    finished=(m.Finished(m.TrajectoryId(9), 0, 55, truncated=False),),
)


def open_log(run_dir: Path, state: ClusterState | None = None, *, rotation: int = 1000, resumed: bool = False):
    return EventLogWriter(
        run_dir,
        config=small_config(snapshot_interval_events=rotation),
        num_prompts=10,
        num_evaluation_prompts=2,
        state=state or ClusterState(),
        resumed=resumed,
    )


def write(log: EventLogWriter, num_events: int) -> None:
    for i in range(num_events):
        log.append(i / 10, m.Tick())
        log.handled([], ClusterState())


def test_what_is_written_is_read_back_exactly(tmp_path: Path):
    log = open_log(tmp_path)
    times = [0.1 + 0.2, 1 / 3, 1e-9, 123456.789012345]
    for now in times:
        log.append(now, REPORT)
        log.handled(COMMANDS, ClusterState())
    (segment,) = segments(tmp_path)
    assert [r.now for r in segment.records] == times
    assert all(r.event == REPORT and r.commands == tuple(COMMANDS) for r in segment.records)
    assert segment.header.num_prompts == 10
    assert segment.header.state == ClusterState()


def test_an_event_is_on_disk_before_it_is_handled(tmp_path: Path):
    log = open_log(tmp_path)
    write(log, 1)
    log.append(5.0, REPORT)
    (segment,) = segments(tmp_path)
    assert segment.records[0].commands == () or segment.records[0].commands is None
    assert segment.records[-1].event == REPORT
    assert segment.records[-1].commands is None


def test_the_log_rotates_with_the_state_it_has_come_to(tmp_path: Path):
    log = open_log(tmp_path, rotation=3)
    state = ClusterState()
    for i in range(7):
        state.next_group = i + 1
        log.append(float(i), m.Tick())
        log.handled([], state)
    log.rotate(state)
    read = list(segments(tmp_path))
    assert [len(s.records) for s in read] == [3, 3, 1, 0]
    assert [s.header.state.next_group for s in read] == [0, 3, 6, 7]
    assert all(r.commands == () for s in read for r in s.records)


def test_a_new_start_goes_on_in_a_new_file(tmp_path: Path):
    write(open_log(tmp_path), 2)
    write(open_log(tmp_path, resumed=True), 1)
    assert [p.name for p in log_files(tmp_path)] == ["000001.jsonl", "000002.jsonl"]
    assert [s.header.resumed for s in segments(tmp_path)] == [False, True]


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_torn_last_line_is_left_out_of_the_newest_file(tmp_path: Path, cut: int):
    write(open_log(tmp_path), 3)
    path = log_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-cut])
    (segment,) = segments(tmp_path)
    assert len(segment.records) == 3 - -(-cut // 39)
    assert segment.torn
    assert "000001.jsonl" in segment.torn


def test_a_torn_line_is_left_out_where_a_resumed_start_follows(tmp_path: Path):
    write(open_log(tmp_path), 3)
    path = log_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    write(open_log(tmp_path, resumed=True), 1)
    assert [len(s.records) for s in segments(tmp_path)] == [2, 1]


def test_a_torn_line_in_the_middle_of_a_run_is_damage(tmp_path: Path):
    write(open_log(tmp_path, rotation=2), 3)
    path = log_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"000001\.jsonl, line 3.*damaged"):
        list(segments(tmp_path))


def test_a_line_that_is_no_event_is_named(tmp_path: Path):
    write(open_log(tmp_path), 2)
    path = log_files(tmp_path)[0]
    path.write_bytes(path.read_bytes() + b'{"now":1.0,"event":{"event":"Nonsense"}}\n')
    with pytest.raises(ValueError, match=r"000001\.jsonl, line 4: .*Nonsense"):
        list(segments(tmp_path))


def test_a_folder_that_no_run_wrote_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no event log"):
        log_files(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        log_files(tmp_path / "missing")


def test_a_killed_writer_loses_no_event_that_it_wrote(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from tests.observe.test_event_log import open_log, REPORT, COMMANDS\n"
        "from laminar.control.state import ClusterState\n"
        f"log = open_log(Path({str(tmp_path)!r}))\n"
        "for i in range(10**9):\n"
        "    log.append(float(i), REPORT); print(i, flush=True); log.handled(COMMANDS, ClusterState())\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(2500):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged = [int(line) for line in writer.stdout.read().splitlines() if line]
    writer.wait(10)
    times = [r.now for s in segments(tmp_path) for r in s.records]
    assert times == [float(i) for i in range(len(times))]
    assert len(times) >= (acknowledged[-1] + 1 if acknowledged else 2500)


def test_it_takes_in_twenty_thousand_events_a_second(tmp_path: Path):
    log, state = open_log(tmp_path, rotation=10**6), ClusterState()
    begin_s = time.process_time()
    for i in range(10_000):
        log.append(i / 10, REPORT)
        log.handled(COMMANDS, state)
    assert time.process_time() - begin_s < 10_000 / 20_000
