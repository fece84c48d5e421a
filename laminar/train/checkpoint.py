"""Keeps checkpoints that are complete or absent, whatever kills the process that writes them (standard library only).

root/step_7.partial   being written                     never listed
root/step_7           renamed, its marker missing       not listed yet
root/step_7/COMPLETE  names every file and its size     listed from here on
root/step_7.replaced  the older one of the same step    listed until step_7 is complete, then deleted
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CHECKPOINTS_FOLDER = "checkpoints"
"""In a run's folder."""
MARKER = "COMPLETE"
_NAME = re.compile(r"step_(\d+)(\.replaced)?")


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written (a full disk, most often); those that were complete before still are."""


class Checkpoint(NamedTuple):
    step: int
    folder: Path


def save_complete(root: Path, step: int, write: Callable[[Path], None]) -> Checkpoint:
    """Let `write` fill a new folder, and make it the checkpoint of `step` in one instant, once all is on disk.

    `write` gets an empty folder; if it raises, nothing is left of it. An OSError becomes CheckpointNotSaved, naming
    the step and the newest checkpoint that there is instead; anything else rises as it is.
    """
    final, partial = root / f"step_{step}", partial_folder(root, step)
    try:
        _delete(partial)
        partial.mkdir(parents=True)
        write(partial)
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
        _sync_tree(partial)
        _put_in_place(partial, final)
        # The marker comes last of all: who sees it may trust that everything else has reached the disk.
        _write_durably(final / MARKER, json.dumps(sizes, indent=1))
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not _is_complete(final):
            shutil.rmtree(final, ignore_errors=True)
        if isinstance(error, OSError):
            newest = newest_complete(root)
            instead = f"the newest complete one is {newest.folder}" if newest else "there is no earlier one"
            raise CheckpointNotSaved(f"checkpoint of step {step} not saved in {root}: {error}; {instead}") from error
        raise
    _delete(_replaced(final))
    return Checkpoint(step, final)


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is in place; `save_complete` makes it."""
    return root / f"step_{step}.partial"


def list_complete(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest step first; none if the folder does not exist."""
    if not root.is_dir():
        return []
    found: dict[int, Checkpoint] = {}
    # By name, so that step_7.replaced comes after step_7, which it must not hide.
    for folder in sorted(root.iterdir()):
        matched = _NAME.fullmatch(folder.name)
        if matched and _is_complete(folder):
            step = int(matched.group(1))
            found.setdefault(step, Checkpoint(step, folder))
    return [found[step] for step in sorted(found)]


def newest_complete(root: Path) -> Checkpoint | None:
    complete = list_complete(root)
    return complete[-1] if complete else None


def prune(root: Path, num_kept: int) -> None:
    """Delete all but the newest `num_kept` complete checkpoints, and what interrupted saves left.

    Not to be called while one is being saved.
    """
    if num_kept < 1:
        raise ValueError(f"checkpoint.num_kept={num_kept} would delete the newest checkpoint; set it to 1 or more")
    kept = {checkpoint.folder for checkpoint in list_complete(root)[-num_kept:]}
    if not kept:
        return
    for folder in sorted(root.iterdir()):
        if folder not in kept and _NAME.fullmatch(folder.name.removesuffix(".partial")):
            _delete(folder)


def _is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file that it names has its size (a copy may have been cut short)."""
    try:
        sizes: dict[str, int] = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _put_in_place(partial: Path, final: Path) -> None:
    replaced = _replaced(final)
    if _is_complete(final):
        _delete(replaced)
        final.rename(replaced)
    else:
        _delete(final)
    partial.rename(final)
    _sync(final.parent)


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + ".replaced")


def _delete(folder: Path) -> None:
    # Interrupted, it leaves a folder that lacks a file that its marker names, so nothing that looks complete.
    if folder.is_dir():
        shutil.rmtree(folder)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in [*_files(folder), *sorted(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
