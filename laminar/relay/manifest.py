"""Describes a weight version: which tensor lies where, what it must sum to, and what log-probs it must give."""

import msgspec


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor under its Hugging Face name; dtype is torch's name ("float32", "bfloat16"), offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Probe(msgspec.Struct, frozen=True):
    """A fixed token sequence and the publisher's log-probs of tokens 1.. under these weights (temperature 1)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """Largest difference allowed: 1e-4 for float32, 5e-2 for bfloat16."""


class Manifest(msgspec.Struct, frozen=True):
    """Everything about one version but its bytes. Tied tensors are stated once, under their checkpoint name."""

    version: int
    step: int
    num_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    probe: Probe


class LeasedVersion(msgspec.Struct, frozen=True):
    """A complete version, mapped read-only while its lease is held: the manifest and the segment's bytes.

    checksum: xxh3_64 over the chunks' xxh3_64 values (8 bytes each, little endian), so it covers every byte.
    path: where other processes of this user on this machine can open the segment, read-only, until the lease ends.
    """

    manifest: Manifest
    checksum: int
    data: memoryview
    path: str = ""
