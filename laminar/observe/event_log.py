"""Writes and reads the event log: every event before it is handled, then the commands that it led to.

The log is the control plane's write-ahead log. It lies in `<run_dir>/events/000001.jsonl, 000002.jsonl, …`:

    {"config": …, "code_version": …, "resumed": …, "state": …}     one header: what a control plane starts from
    {"now": 1.25, "event": {"event": "Tick"}}                      written before the event is handled
    {"commands": [{"command_type": "Load", …}]}                    the commands it led to; no line when there are none

A line goes to the operating system at once and is never synced: it survives the process, not the machine.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import laminar
from laminar.config import Config
from laminar.control.messages import AnyCommand, AnyEvent
from laminar.control.state import ClusterState

EVENTS_FOLDER = "events"


class LogHeader(msgspec.Struct, frozen=True):
    """First line of a log file: all that a control plane needs to go on from here.

    config: the resolved configuration as plain JSON data. resumed: whether a start of the program opens with this
    file, so that its state need not follow from the file before. simulated: whether there was no cluster.
    """

    config: dict[str, Any]
    code_version: str
    num_prompts: int
    num_evaluation_prompts: int
    resumed: bool
    state: ClusterState
    simulated: bool = False


class EventLine(msgspec.Struct, frozen=True):
    now: float
    event: AnyEvent


class CommandsLine(msgspec.Struct, frozen=True):
    commands: tuple[AnyCommand, ...]


class Record(msgspec.Struct, frozen=True):
    """One event as it arrived. `commands` is None when the process ended before it wrote them."""

    line: int
    now: float
    event: AnyEvent
    commands: tuple[AnyCommand, ...] | None


class Segment(msgspec.Struct, frozen=True):
    """One file of the log. torn: says that a half-written last line was left out, and where."""

    path: Path
    header: LogHeader
    records: list[Record]
    torn: str | None


class EventLogWriter:
    """Appends to the log of a run; one writer a run. Opening it starts a new file after those already there."""

    def __init__(
        self,
        run_dir: Path,
        *,
        config: Config,
        num_prompts: int,
        num_evaluation_prompts: int,
        state: ClusterState,
        resumed: bool = False,
        simulated: bool = False,
    ) -> None:
        self._folder = run_dir / EVENTS_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._config: dict[str, Any] = config.model_dump(mode="json")
        self._code_version = code_version()
        self._num_prompts = num_prompts
        self._num_evaluation_prompts = num_evaluation_prompts
        self._simulated = simulated
        self._rotation_events = config.observe.snapshot_interval_events
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()
        self._number = max(map(_number, self._folder.glob("*.jsonl")), default=0)
        self._num_events = 0
        self._descriptor = self._open_next(state, resumed=resumed)

    def append(self, now: float, event: AnyEvent) -> None:
        """Put an event on record; call it before the event is handled, which on a crash counts as handled."""
        self._write(EventLine(now, event))
        self._num_events += 1

    def handled(self, commands: Sequence[AnyCommand], state: ClusterState) -> None:
        """Put on record what the last event led to, and start a new file when this one is long enough."""
        if commands:
            self._write(CommandsLine(tuple(commands)))
        if self._num_events >= self._rotation_events:
            self.rotate(state)

    def rotate(self, state: ClusterState) -> None:
        """Start a new file that opens with this state, which the events so far must have led to."""
        os.close(self._descriptor)
        self._descriptor = self._open_next(state, resumed=False)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_next(self, state: ClusterState, *, resumed: bool) -> int:
        self._number += 1
        self._num_events = 0
        header = LogHeader(
            self._config,
            self._code_version,
            self._num_prompts,
            self._num_evaluation_prompts,
            resumed,
            state,
            self._simulated,
        )
        path = self._folder / f"{self._number:06}.jsonl"
        # Renamed into place once it is whole, so that no reader ever meets half a snapshot.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(self._encoder.encode(header) + b"\n")
        unfinished.rename(path)
        return os.open(path, os.O_WRONLY | os.O_APPEND)

    def _write(self, line: EventLine | CommandsLine) -> None:
        self._encoder.encode_into(line, self._line)
        self._line += b"\n"
        num_written = os.write(self._descriptor, self._line)
        if num_written != len(self._line):
            raise OSError(
                f"the disk under {self._folder} is full: an event could not be written whole; free some space"
            )


def code_version() -> str:
    """Laminar's version and a digest of the code that decides, since the same events replay only under the same."""
    digest = hashlib.sha256()
    folder = Path(laminar.__file__).parent
    for path in [path for part in ("config", "control") for path in sorted((folder / part).rglob("*.py"))]:
        digest.update(path.read_bytes())
    return f"{laminar.__version__}+control.{digest.hexdigest()[:12]}"


def segments(run_dir: Path) -> Iterator[Segment]:
    """Every file of the run's log, oldest first.

    A half-written last line is left out where a kill can leave one: at the end of the newest file, and of one that a
    resumed start followed. Anywhere else it raises ValueError, as a folder without a log does.
    """
    segment: Segment | None = None
    for path in log_files(run_dir):
        following = _read(path)
        if segment is not None:
            yield segment if following.header.resumed else _continued(segment)
        segment = following
    assert segment is not None, "log_files names at least one file"
    yield segment


def newest_segment(run_dir: Path) -> Segment:
    """The last file of the run's log: the newest snapshot, and what happened since."""
    return _read(log_files(run_dir)[-1])


def last_event_at_s(run_dir: Path) -> float:
    """When the last event came; 0 if none did. The newest file has none if the run ended just as it had begun it."""
    for path in reversed(log_files(run_dir)):
        if records := _read(path).records:
            return records[-1].now
    return 0.0


def log_files(run_dir: Path) -> list[Path]:
    """The files of a run's event log, oldest first; raises ValueError for a folder that is no run's."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} does not exist; name the folder that a run wrote (its run_dir)")
    paths = sorted((run_dir / EVENTS_FOLDER).glob("*.jsonl"), key=_number)
    if not paths:
        raise ValueError(
            f"{run_dir} holds no event log ({EVENTS_FOLDER}/000001.jsonl), so no run was written there; "
            "name the folder that a run wrote (its run_dir)"
        )
    return paths


class _Line(msgspec.Struct, frozen=True):
    """Either kind of line that follows the header."""

    now: float | None = None
    event: AnyEvent | None = None
    commands: tuple[AnyCommand, ...] | None = None


def _number(path: Path) -> int:
    if not path.stem.isdecimal():
        raise ValueError(f"{path} is no file of an event log (000001.jsonl, 000002.jsonl, …); move it elsewhere")
    return int(path.stem)


def _read(path: Path) -> Segment:
    first, *lines = path.read_bytes().split(b"\n")
    try:
        header = msgspec.json.decode(first, type=LogHeader)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}, line 1: not a header that this version of Laminar reads ({error})") from error
    torn = f"{path}, line {len(lines) + 1}: the last line is not whole" if lines and lines[-1] else None
    try:
        records = list(_records(path, lines[:-1]))
    except ValueError as error:
        if header.code_version == code_version():
            raise
        raise ValueError(f"{error}; it was written by other code ({header.code_version}): read it with that") from error
    return Segment(path, header, records, torn)


def _records(path: Path, lines: list[bytes]) -> Iterator[Record]:
    """The events with their commands; the last one's are None unless they are on record."""
    decode = msgspec.json.Decoder(_Line).decode
    event: Record | None = None
    for number, text in enumerate(lines, start=2):
        try:
            line = decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a line of an event log ({error})") from error
        if line.commands is not None:
            if event is None:
                raise ValueError(f"{path}, line {number}: commands without the event that led to them")
            yield msgspec.structs.replace(event, commands=line.commands)
            event = None
        elif line.now is not None and line.event is not None:
            if event is not None:
                yield msgspec.structs.replace(event, commands=())
            event = Record(number, line.now, line.event, None)
        else:
            raise ValueError(f"{path}, line {number}: neither an event nor commands")
    if event is not None:
        yield event


def _continued(segment: Segment) -> Segment:
    """A segment that the same process went on from: it is whole, and its last event was handled."""
    if segment.torn:
        raise ValueError(f"{segment.torn}, though the log goes on after it; the file was damaged")
    if not segment.records or segment.records[-1].commands is not None:
        return segment
    last = msgspec.structs.replace(segment.records[-1], commands=())
    return msgspec.structs.replace(segment, records=[*segment.records[:-1], last])
