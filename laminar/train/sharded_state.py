"""Writes and reads the trainer's state as files that any number of ranks can read, a checksum for every tensor inside.

torch.distributed.checkpoint does the files: each rank writes the rows that it holds, and reads those that it is to
hold, whoever wrote them.
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from laminar.train.policy import held_rows
from laminar.train.ranks import Ranks

State = Mapping[str, Tensor]
"""By name. A DTensor is sharded by rows; any other tensor is the same on every rank."""

CHECKSUMS = "checksums."
METADATA_FILE = ".metadata"


def write_state(folder: Path, state: State, ranks: Ranks) -> None:
    """Every rank calls it with the same names. Raises OSError, on every rank, if it could not be written whole."""
    names = sorted(state)
    sums = _checksums(state, names, ranks)
    checked = {CHECKSUMS + name: sums[i].clone() for i, name in enumerate(names)}
    try:
        with _alone_on_purpose():
            save(
                {**state, **checked},
                storage_writer=FileSystemWriter(folder),
                process_group=ranks.checkpoint_group,
                no_dist=ranks.checkpoint_group is None,
            )
    except CheckpointException as error:  # a BaseException, which nobody up there would catch
        raise OSError(_first_failure(error)) from error


def read_state(folder: Path, state: State, ranks: Ranks) -> None:
    """Fill the given tensors, all of `folder` or some. Every rank calls it with the same names.

    Raises ValueError, naming the tensor, for one that is missing, has another shape, or is not what was written.
    """
    if not (folder / METADATA_FILE).is_file():
        raise ValueError(f"{folder} is no checkpoint of a trainer: it has no {METADATA_FILE}")
    names = sorted(state)
    written = {CHECKSUMS + name: torch.zeros((), dtype=torch.int64) for name in names}
    try:
        with _alone_on_purpose():
            load(
                {**state, **written},
                storage_reader=FileSystemReader(folder),
                process_group=ranks.checkpoint_group,
                no_dist=ranks.checkpoint_group is None,
            )
    except CheckpointException as error:
        raise ValueError(f"{folder} cannot be read: {_first_failure(error)}") from error
    found = _checksums(state, names, ranks).tolist()
    damaged = [name for name, value in zip(names, found, strict=True) if value != written[CHECKSUMS + name].item()]
    if damaged:
        raise ValueError(f"{folder}: {damaged[0]} is not what was written there; go back to an earlier checkpoint")


def _checksums(state: State, names: list[str], ranks: Ranks) -> Tensor:
    """One of each tensor: [num_names], int64. The same however the tensors are sharded."""
    sums = torch.tensor([_checksum(state[name], ranks) for name in names], dtype=torch.uint64).view(torch.int64)
    if ranks.checkpoint_group is not None:
        dist.all_reduce(sums, group=ranks.checkpoint_group)
    return sums


def _checksum(tensor: Tensor, ranks: Ranks) -> int:
    """This rank's part: the sum of its rows' xxh3, each seeded with the row's number, modulo 2 ** 64."""
    if not isinstance(tensor, DTensor):
        if not ranks.is_first:
            return 0
        rows, first = tensor, 0
    else:
        rows, first = tensor.to_local(), held_rows(tensor).first
    if rows.numel() == 0:
        return 0
    rows = rows.detach().cpu().contiguous()
    lines = rows.reshape(len(rows) if rows.dim() else 1, -1).view(torch.uint8).numpy()
    return sum(xxhash.xxh3_64_intdigest(line, seed=first + i) for i, line in enumerate(lines)) % 2**64


@contextmanager
def _alone_on_purpose() -> Generator[None]:
    """torch warns of a single process each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
