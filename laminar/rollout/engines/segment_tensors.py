"""Views the bytes of a weight segment as tensors, without copying them."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from mmap import mmap

import torch
from torch import Tensor

from laminar.relay.manifest import TensorEntry

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What a version may be published in (published.ELEMENT_BYTES), as torch has it."""


def tensors_in(segment: memoryview | mmap, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under its checkpoint name, in the order of the entries; reading one reads the segment.

    The segment cannot be unmapped while a tensor, or a view of one, lives.
    """
    with warnings.catch_warnings():
        # The segment is mapped read-only, which is what we want; torch would rather write.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for entry in entries:
            flat = torch.frombuffer(
                segment, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape), offset=entry.offset
            )
            yield entry.name, flat.view(entry.shape)
