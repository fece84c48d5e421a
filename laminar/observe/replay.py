"""Decides a recorded run again: the same events at the same times must give the same commands."""

from pathlib import Path

import msgspec
from pydantic import ValidationError

from laminar.config import Config
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState
from laminar.observe.event_log import (
    LogHeader,
    Record,
    Segment,
    code_version,
    last_event_at_s,
    newest_segment,
    segments,
)

LINE_CHARACTERS_MAX = 2000


class Difference(msgspec.Struct, frozen=True):
    """Where the replay left the record. event, recorded and got are JSON."""

    file: Path
    line: int
    event: str
    recorded: str
    got: str


class ReplayReport(msgspec.Struct, frozen=True):
    """What a replay found; it stops at the first difference.

    torn: the half-written lines that a kill left, each left out. other_code_versions: those of the log that are not
    the running one, under which differences are to be expected.
    """

    num_files: int
    num_events: int
    num_commands: int
    torn: tuple[str, ...]
    other_code_versions: tuple[str, ...]
    difference: Difference | None

    def text(self) -> str:
        """What a person wants to know, in a few lines."""
        notes = [f"{torn}: cut off by a kill and left out" for torn in self.torn]
        notes += [f"the log was decided by other code: {version}" for version in self.other_code_versions]
        counts = f"{self.num_events:,} events and {self.num_commands:,} commands in {self.num_files} files"
        if self.difference is None:
            return "\n".join([*notes, f"{counts}: identical"])
        found = self.difference
        return "\n".join(
            [
                *notes,
                f"{counts} are identical, then {found.file}, line {found.line} differs",
                f"  event:    {_shortened(found.event)}",
                f"  recorded: {_shortened(found.recorded)}",
                f"  got:      {_shortened(found.got)}",
            ]
        )


def replay(run_dir: Path) -> ReplayReport:
    """Re-decide every event of a run and compare the commands, and the state wherever the log holds a snapshot.

    Raises ValueError for a folder without an event log and for a damaged one.
    """
    num_files = num_events = num_commands = 0
    torn: list[str] = []
    versions: dict[str, None] = {}
    plane: ControlPlane | None = None
    difference: Difference | None = None
    for segment in segments(run_dir):
        if plane is not None and not segment.header.resumed:
            difference = _compare_states(segment, plane.state)
            if difference:
                break
        plane = plane_of(segment.header)
        num_files += 1
        torn += [segment.torn] if segment.torn else []
        versions[segment.header.code_version] = None
        for record in segment.records:
            got, difference = _decide(plane, segment.path, record)
            if difference:
                break
            num_events += 1
            num_commands += got
        if difference:
            break
    others = tuple(version for version in versions if version != code_version())
    return ReplayReport(num_files, num_events, num_commands, tuple(torn), others, difference)


class Restored(msgspec.Struct, frozen=True):
    """What control knew when a run ended, however it ended, and the time of the last event."""

    state: ClusterState
    now: float
    num_prompts: int
    config: Config


def restore(run_dir: Path) -> Restored:
    """The newest snapshot and the events since. Commands that the last ones led to may never have been executed.

    Raises ValueError for a folder without an event log.
    """
    segment = newest_segment(run_dir)
    plane = plane_of(segment.header)
    for record in segment.records:
        plane.handle(record.event, record.now)
    return Restored(plane.state, last_event_at_s(run_dir), segment.header.num_prompts, plane.config)


def config_of(header: LogHeader) -> Config:
    """The run's configuration. Raises ValueError for one whose settings this version no longer knows."""
    try:
        return Config.model_validate(header.config)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, details["loc"])) for details in error.errors())
        raise ValueError(
            f"the run was written by Laminar {header.code_version}, and this one ({code_version()}) does not read its "
            f"settings ({places}); use the version that wrote it"
        ) from error


def plane_of(header: LogHeader) -> ControlPlane:
    """A control plane that stands where the log file opens."""
    return ControlPlane(
        config_of(header),
        num_prompts=header.num_prompts,
        num_evaluation_prompts=header.num_evaluation_prompts,
        state=header.state,
    )


def _decide(plane: ControlPlane, path: Path, record: Record) -> tuple[int, Difference | None]:
    """How many commands the event led to, and the difference from those on record, if any."""
    try:
        got = tuple(plane.handle(record.event, record.now))
    except Exception as error:  # noqa: BLE001 - the record may be of code that no longer is, or of the very fault looked for
        return 0, _difference(path, record, f"{type(error).__name__}: {error}")
    if record.commands is None or got == record.commands:
        return len(got), None
    return len(got), _difference(path, record, _json(got))


def _difference(path: Path, record: Record, got: str) -> Difference:
    return Difference(path, record.line, _json(record.event), _json(record.commands), got)


def _compare_states(segment: Segment, state: ClusterState) -> Difference | None:
    """Compare the written forms, since the order within a dict decides too: both as a snapshot is read."""
    as_read = msgspec.json.decode(msgspec.json.encode(state), type=ClusterState)
    recorded, got = _fields(segment.header.state), _fields(as_read)
    for name, value in recorded.items():
        if value != got[name]:
            return Difference(segment.path, 1, "snapshot", f"{name}: {value}", f"{name}: {got[name]}")
    return None


def _fields(state: ClusterState) -> dict[str, str]:
    return {name: _json(value) for name, value in msgspec.structs.asdict(state).items()}


def _shortened(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[:LINE_CHARACTERS_MAX]} … ({len(text):,} characters)"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
