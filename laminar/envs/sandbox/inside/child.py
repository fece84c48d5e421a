"""Is one child: confines itself, waits for the code of its only call, runs it and is gone."""

from __future__ import annotations

import ast
import fcntl
import io
import linecache
import os
import resource
import sys
import traceback
from typing import Any

from laminar.envs.sandbox.inside import landlock, seccomp
from laminar.envs.sandbox.inside.limits import Limits, Settings

FILE_NAME = "<tool>"
NUM_FILES_OPEN_MAX = 64
STACK_BYTES = 8 * 2**20
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_RANDOM = ("/dev/urandom", "/dev/random")


def live(settings: Settings, work_folder: str, code_fd: int, output_fd: int) -> None:
    """Never returns. Everything but the two pipes is closed, so nothing of the zygote's can be spoken to."""
    status = 1
    try:
        os.setpgid(0, 0)
        _keep_only(code_fd, output_fd)
        os.chdir(work_folder)
        os.umask(0o077)
        _limit(settings.limits)
        if settings.landlock:
            readable = (*settings.readable, *settings.search_path, *_RANDOM)
            landlock.confine(readable=readable, writable=(work_folder, *_DEVICES))
        seccomp.confine()
        status = _run(_read_all(3))
    finally:
        os._exit(status)


def _keep_only(code_fd: int, output_fd: int) -> None:
    """Code on 3, output on 1 and 2, nothing on 0."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    # Moved out of the way first: one may have the number that another is to get.
    code_fd, output_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (code_fd, output_fd))
    for fd, number in ((nothing, 0), (output_fd, 1), (output_fd, 2), (code_fd, 3)):
        os.dup2(fd, number)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))


def _limit(limits: Limits) -> None:
    """RLIMIT_NPROC is set by the zygote as the call begins, since it may have to count others' processes."""
    for kind, amount in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, NUM_FILES_OPEN_MAX),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (amount, amount))
    # The kernel asks at the first, and kills at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def _read_all(fd: int) -> str:
    parts: list[bytes] = []
    while part := os.read(fd, 65536):
        parts.append(part)
    os.close(fd)
    return b"".join(parts).decode(errors="replace")


def _run(code: str) -> int:
    """As a notebook runs a cell: the value of a last expression is shown. Returns the exit status."""
    # One stream for both, so that a traceback stands where it happened.
    sys.stdout = sys.stderr = io.TextIOWrapper(
        io.FileIO(1, "w"), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    sys.argv = [FILE_NAME]
    status = 0
    try:
        _execute(code)
        _join_threads()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  (the edge of the process)
        _explain(error, code)
        status = 1
    sys.stdout.flush()
    return status & 0xFF


def _execute(code: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    tree = ast.parse(code, FILE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE_NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), names)
        if value is not None:
            print(repr(value))


def _join_threads() -> None:
    threading = sys.modules.get("threading")
    if threading is not None:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()


def _explain(error: BaseException, code: str) -> None:
    """The traceback of the model's own frames."""
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE_NAME:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames, file=sys.stdout)
