"""Writes scalars to a TensorBoard event file, with TensorBoard's own writer (its others import torch or TensorFlow)."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ScalarFile:
    """One event file of a folder; each write is on disk when it returns."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = EventFileWriter(str(folder))  # untyped

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = summary_pb2.Summary(value=scalars)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def undo(self, step: int) -> None:
        """Let TensorBoard leave out what was written of later steps than this one."""
        begins_again = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=begins_again))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
