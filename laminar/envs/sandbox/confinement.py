"""Starts a zygote so that its children are confined: inside bubblewrap's namespaces, or by Landlock in each child."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laminar.envs.sandbox.inside import landlock
from laminar.envs.sandbox.inside.limits import Limits, Settings

Backend = Literal["bubblewrap", "landlock"]

PYTHON = "/usr/bin/python3"
"""Tried before our own interpreter, which often lies in a home folder."""
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")
LOADER_CACHE = "/etc/ld.so.cache"
PROBE_DEADLINE_S = 30.0
_ABOUT = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix, sys.version_info[:2]]))"


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs the code, and the folders that it needs."""

    path: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Confinement:
    """How the zygotes of a pool are started. `packages`, `preloaded`: as in Settings."""

    backend: Backend
    interpreter: Interpreter
    limits: Limits
    bubblewrap: str = ""
    """The program, with that backend."""
    packages: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()

    def settings(self) -> Settings:
        in_namespaces = self.backend == "bubblewrap"
        return Settings(
            limits=self.limits,
            work_folder="/tmp" if in_namespaces else None,
            temporary_folder=tempfile.gettempdir(),
            readable=self._readable(),
            landlock=not in_namespaces,
            search_path=self.packages,
            preloaded=self.preloaded,
            # As root each slot has a user of its own; in a namespace only what is in it is seen.
            counts_tasks=in_namespaces or os.getuid() != 0,
        )

    def command(self, program: str) -> list[str]:
        """Run a program given as text, in the interpreter."""
        python = [self.interpreter.path, "-I", "-S", "-B", "-c", program]
        return python if self.backend == "landlock" else [*self._namespaces(), *python]

    def _readable(self) -> tuple[str, ...]:
        return (*SYSTEM_LIBRARIES, LOADER_CACHE, *self.interpreter.prefixes, self.interpreter.path)

    def _namespaces(self) -> list[str]:
        shown = dict.fromkeys((*self.interpreter.prefixes, self.interpreter.path, *self.packages))
        return [
            self.bubblewrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
            *("--clearenv", "--hostname", "sandbox", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"),
            *(word for path in SYSTEM_LIBRARIES for word in _shown_as_it_is(path)),
            *("--ro-bind-try", LOADER_CACHE, LOADER_CACHE),
            *(word for path in shown if not _is_below(path, SYSTEM_LIBRARIES) for word in ("--ro-bind", path, path)),
            # Left writable, /dev would be memory without a bound, and would carry files from one call to the next.
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--size", str(self.limits.file_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
        ]


def confinements(
    limits: Limits,
    *,
    backend: Backend | None = None,
    python: Path | None = None,
    packages: Sequence[Path] = (),
    preloaded: Sequence[str] = (),
    user: int | None = None,
) -> list[Confinement]:
    """Those that this machine seems to have, best first; `backend` names the only one to consider.

    user: whose rights the interpreter is looked for with (none: our own). Whether one of them holds, only a trial
    shows. Raises ValueError if there is none, saying what each one lacks.
    """
    interpreter = find_interpreter(python, user)
    folders = tuple(str(path.absolute()) for path in packages)
    found: list[Confinement] = []
    lacks: list[str] = []
    if backend in (None, "bubblewrap"):
        if program := shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent)):
            found.append(Confinement("bubblewrap", interpreter, limits, program, folders, tuple(preloaded)))
        else:
            lacks.append("bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    if backend in (None, "landlock"):
        if landlock.abi() > 0:
            found.append(Confinement("landlock", interpreter, limits, "", folders, tuple(preloaded)))
        else:
            lacks.append("this kernel has no Landlock (Linux 5.13, and listed in /sys/kernel/security/lsm)")
    if not found:
        raise ValueError(f"no sandbox for the code of models: {'; '.join(lacks)}. It is never run without one")
    return found


def find_interpreter(python: Path | None, user: int | None) -> Interpreter:
    """The first that the user can run: the one named, else the system's, else our own. Raises ValueError."""
    candidates = [str(python)] if python is not None else [PYTHON, os.path.realpath(sys.executable)]
    refusals: list[str] = []
    for candidate in candidates:
        try:
            asked = subprocess.run(
                [candidate, "-I", "-S", "-c", _ABOUT],
                capture_output=True,
                text=True,
                check=True,
                timeout=PROBE_DEADLINE_S,
                env={},
                cwd="/",
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            refusals.append(f"{candidate}: {error}")
            continue
        prefix, exec_prefix, version = json.loads(asked.stdout)
        if tuple(version) < (3, 10):
            refusals.append(f"{candidate} is Python {version[0]}.{version[1]}; it must be 3.10 or newer")
            continue
        prefixes = dict.fromkeys(_libraries(path) for path in (prefix, exec_prefix))
        return Interpreter(os.path.realpath(candidate), tuple(prefixes))
    whose = "" if user is None else " as a user without rights"
    raise ValueError(f"sandbox.python: no interpreter can be run{whose}: {'; '.join(refusals)}; name one that can")


def _libraries(prefix: str) -> str:
    """Of the system's interpreter only the libraries; another one's folder may be anything, and has its own."""
    return "/usr/lib" if prefix == "/usr" else prefix


def _shown_as_it_is(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if os.path.isdir(path) else []


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
