"""A pool of slots: what a call gives, what it leaves behind (nothing), who waits, and what dies."""

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from laminar.envs.sandbox.inside.limits import Limits
from laminar.envs.sandbox.sandbox import SandboxUnavailable
from tests.envs.sandbox.machine import BACKENDS, lacking, pool
from tests.rollout.waiting import reach

BUSY_FOR_A_SECOND = """
import time
while time.process_time() < 1: pass
7
"""


@pytest.fixture(params=BACKENDS)
async def backend(request):
    if (lacks := await lacking(request.param)) is not None:
        pytest.skip(lacks)
    return request.param


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("829+351", "ok", "1180\n"),
        ("x = 3\nprint(x)\nx*2", "ok", "3\n6\n"),
        ("x = 3", "ok", ""),
        ("None", "ok", ""),
        ("", "ok", ""),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "ok", "out\nerr\nout\n"),
        ("def f(n): return n and n * f(n - 1) or 1\nf(5)", "ok", "120\n"),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit('no')", "error", "no\n"),
        ("print('\\ud800')", "ok", "\\ud800\n"),
        ("import math, json, re, random, itertools, fractions, decimal\nmath.comb(10, 3)", "ok", "120\n"),
        ("import asyncio\nasync def f(): return 7\nasyncio.run(f())", "ok", "7\n"),
        ("import threading\nthreading.Thread(target=lambda: print('late')).start()", "ok", "late\n"),
        ("import os, signal\nsignal.raise_signal(9)", "error", None),
        ("open('x', 'w').write('7')\nopen('x').read()", "ok", "'7'\n"),
        ("import tempfile\ntempfile.NamedTemporaryFile().write(b'1')", "ok", "1\n"),
    ],
)
async def test_code_runs_as_a_notebook_runs_a_cell(backend, code, status, output):
    async with pool(backend, num_slots=1) as sandbox:
        outcome = await sandbox.run(code)
    assert outcome.status == status, outcome
    if output is not None:
        assert outcome.output == output


async def test_an_error_is_shown_as_the_model_s_own_traceback(backend):
    async with pool(backend, num_slots=1) as sandbox:
        raised = await sandbox.run("def half(x):\n    return x / 0\n\nhalf(1)")
        malformed = await sandbox.run("print('a'")
    assert raised.status == malformed.status == "error"
    assert raised.output.startswith(
        'Traceback (most recent call last):\n  File "<tool>", line 4, in <module>\n    half(1)'
    )
    assert "ZeroDivisionError: division by zero" in raised.output
    assert "child" not in raised.output
    assert "SyntaxError" in malformed.output
    assert "print('a'" in malformed.output


async def test_a_call_knows_nothing_of_the_one_before(backend):
    leave = """
import builtins, os, sys, json
builtins.leak = json.leak = 1
os.makedirs('deep/er')
os.mkdir('shut', 0)
open('deep/er/file', 'w').write('x')
os.symlink('/', 'link')
os.environ['LEAK'] = '1'
"""
    look = """
import builtins, json, os
print(hasattr(builtins, 'leak'), hasattr(json, 'leak'), os.listdir('.'), os.environ.get('LEAK'))
"""
    async with pool(backend, num_slots=1) as sandbox:
        assert (await sandbox.run(leave)).status == "ok"
        assert (await sandbox.run(look)).output == "False False [] None\n"


async def test_what_was_printed_before_a_stop_is_kept_and_the_model_is_told(backend):
    async with pool(backend, Limits(output_bytes=1000), num_slots=1) as sandbox:
        slow = await sandbox.run("print('begun')\nwhile True: pass", wall_s=0.3)
        chatty = await sandbox.run("while True: print('x')")
    assert slow.text() == "begun\n[stopped: it ran longer than allowed]"
    assert chatty.status == "output"
    assert len(chatty.output) == 1000


async def test_a_call_can_only_lower_the_limit_on_time(backend):
    async with pool(backend, Limits(wall_s=0.3), num_slots=1) as sandbox:
        outcome = await sandbox.run("while True: pass", wall_s=1000.0)
    assert outcome.status == "timeout"


async def test_packages_are_imported_and_what_is_preloaded_is_there(backend, tmp_path):
    folder = Path("/var/tmp") / tmp_path.name
    folder.mkdir()
    try:
        (folder / "laminar_test_package.py").write_text("value = 41\n")
        async with pool(backend, num_slots=1, packages=(folder,), preloaded=("fractions",)) as sandbox:
            imported = await sandbox.run("import laminar_test_package as p\np.value + 1")
            preloaded = await sandbox.run("import sys\n'fractions' in sys.modules")
            written = await sandbox.run(f"open('{folder}/new', 'w')")
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert imported.output == "42\n"
    assert preloaded.output == "True\n"
    assert written.status == "error"


async def test_as_many_run_at_once_as_there_are_slots_and_the_others_wait(backend):
    async with pool(backend, num_slots=2) as sandbox:
        stamp = "import time\nbegan = time.time()\ntime.sleep(0.2)\nprint(began, time.time())"
        outcomes = await asyncio.gather(*(sandbox.run(stamp) for _ in range(6)))
    spans = [tuple(map(float, outcome.output.split())) for outcome in outcomes]
    at_once = [sum(b < began + 0.1 < e for b, e in spans) for began, _ in spans]
    assert max(at_once) == 2


async def test_a_queue_that_is_full_and_a_wait_that_is_too_long_are_refused_by_name(backend):
    async with pool(backend, num_slots=1, num_queued_max=1, queue_deadline_s=0.2) as sandbox:
        busy = asyncio.create_task(sandbox.run("import time\ntime.sleep(5)"))
        await reach("the slot is taken", lambda: sandbox.num_free == 0)
        waiting = asyncio.create_task(sandbox.run("1"))
        await reach("one waits", lambda: sandbox.num_queued == 1)
        with pytest.raises(SandboxUnavailable, match=r"sandbox\.num_queued_max=1"):
            await sandbox.run("2")
        with pytest.raises(SandboxUnavailable, match=r"sandbox\.queue_deadline_s=0\.2"):
            await waiting
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_a_call_that_is_cancelled_is_stopped_and_its_slot_serves_on(backend):
    before = descendants()
    async with pool(backend, num_slots=1) as sandbox:
        call = asyncio.create_task(sandbox.run("while True: pass"))
        await reach("it runs", lambda: busy(before))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await sandbox.run("1+1")).output == "2\n"
        await reach("the loop has ended", lambda: not busy(before))


async def test_a_call_whose_slot_dies_is_made_again(backend):
    before = descendants()
    async with pool(backend, num_slots=1) as sandbox:
        call = asyncio.create_task(sandbox.run(BUSY_FOR_A_SECOND))
        await reach("it runs", lambda: busy(before))
        end(zygotes(before))
        assert (await call).output == "7\n"


async def test_a_sandbox_whose_slots_keep_dying_says_so(backend):
    before = descendants()
    async with pool(backend, num_slots=1) as sandbox:
        call = asyncio.create_task(sandbox.run("while True: pass", wall_s=60.0))
        for _ in range(2):
            await reach("it runs", lambda: busy(before))
            killed = zygotes(before)
            end(killed)
            await reach("another took its place, or nobody", lambda k=killed: not k & zygotes(before))
        with pytest.raises(SandboxUnavailable, match="the sandbox's process ended"):
            await call
        assert (await sandbox.run("1+1")).output == "2\n"


async def test_nothing_is_left_of_a_closed_pool(backend):
    before, open_before = descendants(), num_open_files()
    folders_before = work_folders()
    async with pool(backend) as sandbox:
        await asyncio.gather(*(sandbox.run(f"open('f', 'w').write('x')\n{n}") for n in range(100)))
        assert descendants() - before
    await reach("every process is gone", lambda: not descendants() - before)
    assert num_open_files() <= open_before
    assert work_folders() <= folders_before


def descendants() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if p.is_running() and p.status() != "zombie"}


def zygotes(before: set[psutil.Process]) -> set[psutil.Process]:
    """Or the bubblewrap around it."""
    return {p for p in psutil.Process().children() if p.is_running() and p.status() != "zombie"} - before


def busy(before: set[psutil.Process]) -> bool:
    """Whether code in the sandbox computes, and has for longer than a start takes."""
    for process in descendants() - before:
        try:
            if process.cpu_times().user > 0.3:
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def num_open_files() -> int:
    return psutil.Process().num_fds()


def work_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("laminar-sandbox-*"))
