"""Shows a leased version as tensors, whole or as the slice of a tensor-parallel rank, without copying a byte.

A rank of T reads of each projection what it serves and nothing else: rows of what is split by output, columns of what
is split by input. Fused parameters (query, key and value; gate and up) are filled part by part.

    q [heads * d, hidden]     Split(dim=0)             rows    t/T .. (t+1)/T
    k, v                      Split(dim=0, num_parts=num_kv_heads if it is less than T)
    o, down                   Split(dim=1)             columns t/T .. (t+1)/T
    norms                     whole
"""

import math
import warnings
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from laminar.relay.manifest import LeasedVersion

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class Split(msgspec.Struct, frozen=True):
    """How a tensor is shared out among tensor-parallel ranks: into `num_parts` along `dim`.

    num_parts: fewer than there are ranks (key-value heads, say) gives neighbouring ranks the same part; 0: one each.
    """

    dim: int
    num_parts: int = 0


def views_of(leased: LeasedVersion) -> dict[str, Tensor]:
    """Every tensor, by name, as a view of the segment: valid while the lease is held, and read-only though torch
    cannot say so. Raises ValueError for a dtype that is not one of DTYPES."""
    views: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        # The segment is mapped read-only, which is what we want; torch would rather write.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for entry in leased.manifest.tensors:
            if entry.dtype not in DTYPES:
                raise ValueError(f"tensor {entry.name!r} is {entry.dtype}; known are {', '.join(DTYPES)}")
            count = math.prod(entry.shape)
            if count:
                flat = torch.frombuffer(leased.data, dtype=DTYPES[entry.dtype], count=count, offset=entry.offset)
                views[entry.name] = flat.view(entry.shape)
            else:
                views[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return views


def slice_of(name: str, tensor: Tensor, split: Split | None, *, rank: int, num_ranks: int) -> Tensor:
    """What a tensor-parallel rank serves of a tensor (none: all of it), still a view."""
    if split is None:
        return tensor
    num_parts = split.num_parts or num_ranks
    size = tensor.shape[split.dim]
    if size % num_parts or num_ranks % num_parts:
        raise ValueError(
            f"tensor {name!r}: dimension {split.dim} of {tuple(tensor.shape)} cannot be shared out as {num_parts} "
            f"parts among {num_ranks} tensor-parallel ranks; choose a size that divides it"
        )
    length = size // num_parts
    return tensor.narrow(split.dim, rank * num_parts // num_ranks * length, length)


def fill(
    target: Tensor,
    parts: Sequence[str],
    views: Mapping[str, Tensor],
    split: Split | None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Copy this rank's slices of `parts` into a fused parameter, one below the other (dimension 0).

    Raises ValueError, naming the parts, before anything is written if one is missing or they do not fit exactly.
    """
    missing = [name for name in parts if name not in views]
    if missing:
        raise ValueError(f"tensor {missing[0]!r} is not in this version")
    slices = [slice_of(name, views[name], split, rank=rank, num_ranks=num_ranks) for name in parts]
    rows = sum(one.shape[0] for one in slices)
    if (rows, *slices[0].shape[1:]) != tuple(target.shape):
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in zip(parts, slices, strict=True))
        raise ValueError(f"{shapes} do not fill a parameter of shape {tuple(target.shape)}")
    start = 0
    for one in slices:
        target[start : start + one.shape[0]].copy_(one)
        start += one.shape[0]
