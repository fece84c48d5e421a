"""Lays tensors out in a segment and holds every later publish to the layout of the first one."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from laminar.relay.chunks import CHUNK_BYTES_MAX
from laminar.relay.manifest import Manifest, TensorEntry

ALIGNMENT_BYTES = 64
"""A cache line, and what every dtype and vector load needs."""


class TensorForm(msgspec.Struct, frozen=True):
    """A tensor as the trainer has it: dtype is torch's name ("float32"), before any conversion."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def lay_out(tensors: Iterable[tuple[TensorForm, str, int]]) -> tuple[TensorEntry, ...]:
    """Where each tensor goes, in the order given: (form, dtype to publish in, bytes an element)."""
    entries: list[TensorEntry] = []
    offset = 0
    for form, dtype, element_bytes in tensors:
        num_bytes = math.prod(form.shape) * element_bytes
        entries.append(TensorEntry(form.name, dtype, form.shape, offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries)


def laid_out_bytes(entries: Sequence[TensorEntry]) -> int:
    """Size of the whole segment, the last tensor's padding included."""
    return max(
        (-(-(entry.offset + entry.num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for entry in entries), default=0
    )


def check_same_layout(first: Sequence[TensorForm], now: Sequence[TensorForm]) -> None:
    """Raise ValueError, naming the tensor, unless a publish has the very tensors of the first; order is free."""
    check_names_differ(now)
    expected = {form.name: form for form in first}
    given = {form.name: form for form in now}
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    if missing and extra:
        raise ValueError(
            f"tensor {extra[0]!r} was not in the first publish and {missing[0]!r} is missing now: was it renamed? "
            "Every publish must have the same tensors"
        )
    if missing:
        raise ValueError(f"tensor {missing[0]!r} is missing; every publish must have the tensors of the first")
    if extra:
        raise ValueError(f"tensor {extra[0]!r} was not in the first publish; every publish must have the same tensors")
    for name, form in expected.items():
        if given[name].shape != form.shape:
            raise ValueError(f"tensor {name!r} has shape {given[name].shape}; it was published with {form.shape} first")
        if given[name].dtype != form.dtype:
            raise ValueError(f"tensor {name!r} is {given[name].dtype}; it was published from {form.dtype} first")


def check_names_differ(forms: Sequence[TensorForm]) -> None:
    seen: set[str] = set()
    for form in forms:
        if form.name in seen:
            raise ValueError(f"tensor {form.name!r} is given twice; state each (tied ones too) once")
        seen.add(form.name)


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError for a manifest that describes no possible version; a relay trusts none that it receives."""
    if manifest.version < 0 or manifest.step < 0:
        raise ValueError(f"version {manifest.version} of step {manifest.step} cannot be: both count from 0")
    if manifest.num_bytes < 1:
        raise ValueError(f"version {manifest.version} has {manifest.num_bytes} bytes")
    if not 1 <= manifest.chunk_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(
            f"chunks of {manifest.chunk_bytes} bytes are not allowed; set relay.chunk_bytes to 1 to {CHUNK_BYTES_MAX}"
        )
    for tensor in manifest.tensors:
        if tensor.offset < 0 or tensor.num_bytes < 0 or tensor.offset + tensor.num_bytes > manifest.num_bytes:
            raise ValueError(f"tensor {tensor.name!r} does not lie inside version {manifest.version}")
