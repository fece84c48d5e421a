"""One run at a time writes to a folder, and none that is there is overwritten."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cluster.folder import FolderLock

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from laminar.cluster.folder import FolderLock
with FolderLock(Path(sys.argv[1]), resume=False, fresh=False):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def write_a_run(run_dir: Path) -> None:
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "events" / "000001.jsonl").write_text("{}\n")


def test_a_new_folder_is_made_and_held(run_dir):
    with FolderLock(run_dir, resume=False, fresh=False):
        assert (run_dir / "lock").read_text() == f"{os.getpid()}\n"
    with FolderLock(run_dir, resume=False, fresh=True):
        assert [path.name for path in run_dir.parent.iterdir()] == ["run"], "there was no run to move aside"


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"fresh": True}], ids=["anew", "resumed", "fresh"])
def test_a_folder_in_use_is_refused_by_its_owner_s_pid_until_that_is_killed(run_dir, how):
    options = {"resume": False, "fresh": False} | how
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    write_a_run(run_dir)
    with pytest.raises(
        ValueError, match=rf"in use by process {owner.pid}: wait for that run, stop it, or give .*run_dir"
    ):
        FolderLock(run_dir, **options)
    assert list(run_dir.parent.iterdir()) == [run_dir]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    with FolderLock(run_dir, **(options | {"resume": not options["fresh"]})):
        pass


def test_a_run_that_is_there_is_not_overwritten(run_dir):
    write_a_run(run_dir)
    with pytest.raises(ValueError, match="holds a run already: --resume goes on with it, --fresh moves it aside"):
        FolderLock(run_dir, resume=False, fresh=False)
    with FolderLock(run_dir, resume=True, fresh=False):  # the refusal holds no lock
        assert (run_dir / "events" / "000001.jsonl").read_text() == "{}\n"


def test_fresh_moves_each_earlier_run_aside(run_dir, capsys):
    for number in (1, 2):
        write_a_run(run_dir)
        with FolderLock(run_dir, resume=False, fresh=True):
            assert [path.name for path in run_dir.iterdir()] == ["lock"]
            moved = run_dir.with_name(f"run.{number}")
            assert (moved / "events" / "000001.jsonl").read_text() == "{}\n"
            assert f"is now in {moved}" in capsys.readouterr().out
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
                FolderLock(run_dir, resume=False, fresh=False)


def test_a_folder_without_a_run_cannot_be_resumed_and_is_not_made(run_dir):
    with pytest.raises(ValueError, match="holds no run to resume; leave out --resume"):
        FolderLock(run_dir, resume=True, fresh=False)
    assert not run_dir.exists(), "a mistyped name leaves nothing behind"


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=rf"run_dir={run_dir} cannot be written to \(.*; name another folder"):
            FolderLock(run_dir, resume=False, fresh=False)
