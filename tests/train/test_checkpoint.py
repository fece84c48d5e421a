import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from laminar.train.checkpoint import (
    MARKER,
    Checkpoint,
    CheckpointNotSaved,
    list_complete,
    newest_complete,
    prune,
    save_complete,
)

DIES_WHILE_SAVING = Path(__file__).parent / "dies_while_saving.py"
REPOSITORY = Path(__file__).parents[2]
NUM_PIECES = 3
NUM_MOMENTS_MAX = 200


def save(root: Path, step: int, text: str = "whole") -> Checkpoint:
    return save_complete(root, step, lambda folder: write_pieces(folder, text))


def write_pieces(folder: Path, text: str) -> None:
    (folder / "nested").mkdir()
    for file in (folder / "some.bin", folder / "nested" / "more.bin"):
        file.write_text(f"{text}\n" * NUM_PIECES)


def load(folder: Path) -> str:
    """The text that all files agree on, or an error if any is cut short."""
    texts = {line for file in ("some.bin", "nested/more.bin") for line in (folder / file).read_text().splitlines()}
    lines = [(folder / file).read_text().count("\n") for file in ("some.bin", "nested/more.bin")]
    assert lines == [NUM_PIECES, NUM_PIECES]
    (text,) = texts
    return text


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_complete(root)]


def kill_at_every_moment(root: Path, prepare: Path, step: int) -> Iterator[None]:
    """Let a process save `step` into a copy of `prepare` and die, a moment later each time, until it survives."""
    for moment in range(NUM_MOMENTS_MAX):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(prepare, root)
        command = [sys.executable, "-S", DIES_WHILE_SAVING, root, str(step), "new", str(moment)]
        saver = subprocess.run(command, env={"PYTHONPATH": str(REPOSITORY)}, check=False, timeout=60, stderr=PIPE)
        assert saver.returncode in (0, -signal.SIGKILL), saver.stderr
        yield
        if saver.returncode == 0:
            assert moment > 10
            return
    raise AssertionError(f"still dying after {NUM_MOMENTS_MAX} moments")


def test_kill_at_any_moment_leaves_a_checkpoint_whole_or_absent(tmp_path):
    save(tmp_path / "before", 1, "old")
    outcomes = set()
    for _ in kill_at_every_moment(tmp_path / "run", tmp_path / "before", 2):
        outcomes.add(tuple((step, load(folder)) for step, folder in list_complete(tmp_path / "run")))
        assert save(tmp_path / "run", 2, "retry").step == 2  # what the dead left is no obstacle
        assert load(newest_complete(tmp_path / "run").folder) == "retry"
    assert outcomes == {((1, "old"),), ((1, "old"), (2, "new"))}


def test_kill_at_any_moment_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path):
    save(tmp_path / "before", 1, "old")
    outcomes = set()
    for _ in kill_at_every_moment(tmp_path / "run", tmp_path / "before", 1):
        outcomes.add(tuple((step, load(folder)) for step, folder in list_complete(tmp_path / "run")))
        save(tmp_path / "run", 1, "retry")
        assert [load(folder) for _, folder in list_complete(tmp_path / "run")] == ["retry"]
    assert outcomes == {((1, "old"),), ((1, "new"),)}


def test_listed_oldest_first_by_number(tmp_path):
    assert list_complete(tmp_path / "absent") == []
    assert newest_complete(tmp_path / "absent") is None
    for step in (10, 9, 2):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 9, 10]
    assert newest_complete(tmp_path) == Checkpoint(10, tmp_path / "step_10")


@pytest.mark.parametrize("damage", ["no marker", "short file", "missing file", "garbled marker"])
def test_a_damaged_folder_is_not_complete(tmp_path, damage):
    save(tmp_path, 1)
    folder = save(tmp_path, 2).folder
    match damage:
        case "no marker":
            (folder / MARKER).unlink()
        case "short file":
            (folder / "some.bin").write_text("whole\n")
        case "missing file":
            (folder / "nested" / "more.bin").unlink()
        case _:
            (folder / MARKER).write_text('{"some')
    assert steps(tmp_path) == [1]


def test_a_full_disk_leaves_the_previous_one_and_is_named(tmp_path):
    def write(folder: Path) -> None:
        write_pieces(folder, "half")
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 3)
    with pytest.raises(CheckpointNotSaved, match=r"step 4 not saved .*No space left.*newest complete one is .*step_3"):
        save_complete(tmp_path, 4, write)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    with pytest.raises(CheckpointNotSaved, match="step 3 not saved"):
        save_complete(tmp_path, 3, write)
    assert load(tmp_path / "step_3") == "whole"


def test_a_mistake_of_the_writer_rises_as_it_is(tmp_path):
    def write(folder: Path) -> None:
        raise KeyError(folder.name)

    with pytest.raises(KeyError):
        save_complete(tmp_path, 1, write)
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_clears_what_was_interrupted(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step_5" / MARKER).unlink()
    (tmp_path / "step_6.partial").mkdir()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_3", "step_4"]
    with pytest.raises(ValueError, match="num_kept=0"):
        prune(tmp_path, 0)
    assert steps(tmp_path) == [3, 4]


def test_prune_leaves_everything_when_nothing_is_complete(tmp_path):
    (tmp_path / "step_1").mkdir()
    prune(tmp_path, 1)
    assert (tmp_path / "step_1").is_dir()
