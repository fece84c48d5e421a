"""Defines what a sandbox is to whoever has code to run: one call in, one outcome out, whatever the code does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal["ok", "error", "timeout", "cpu", "memory", "files", "output", "killed"]

_EXPLAINED: dict[Status, str] = {
    "timeout": "stopped: it ran longer than allowed",
    "cpu": "stopped: it used more CPU time than allowed",
    "memory": "stopped: it used more memory than allowed",
    "files": "stopped: it wrote more to files than allowed",
    "output": "stopped: it printed more than allowed",
    "killed": "stopped: a signal ended it",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one call. `error`: it raised, or exited with a status that is not 0."""

    status: Status
    output: str
    """What it printed, to both streams; cut at the limit."""
    wall_s: float

    def text(self) -> str:
        """For the model: what it printed, and why it was stopped if it was."""
        said = self.output.rstrip("\n")
        why = _EXPLAINED.get(self.status)
        return said if why is None else f"{said}\n[{why}]".lstrip("\n")


class SandboxUnavailable(RuntimeError):
    """A call that could not be run, or whose outcome was lost: no fault of the code's."""


class Sandbox(Protocol):
    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        """Run Python to its end, or to a limit; `wall_s` may lower the limit on time.

        Calls know nothing of one another, so one may be run again. Cancelled, it is stopped. Raises
        SandboxUnavailable, within a deadline that the sandbox has been given.
        """
        ...

    async def close(self) -> None: ...


class NoSandbox:
    """Where an environment is asked for prompts only."""

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        raise SandboxUnavailable("there is no sandbox here")

    async def close(self) -> None: ...
