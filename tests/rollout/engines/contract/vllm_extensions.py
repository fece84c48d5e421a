"""Worker extensions for tests: what loads weights in vLLM's workers, with a fault or with an eye on it."""

import mmap
from pathlib import Path

from laminar.relay.manifest import TensorEntry
from laminar.rollout.engines.segment_tensors import tensors_in
from laminar.rollout.engines.vllm_worker import SegmentLoader

SEGMENT = "memfd:laminar-weights"


class ForgetsTiedHead(SegmentLoader):
    """Loads as vLLM would by itself."""

    def _take_tensors(self, segment: mmap.mmap, entries: tuple[TensorEntry, ...]) -> None:
        self.model_runner.reload_weights(weights_iterator=tensors_in(segment, entries))


class CountsPages(SegmentLoader):
    """Knows how much of the segment a load has touched: what is not read is not mapped."""

    touched_bytes = 0

    def _take_tensors(self, segment: mmap.mmap, entries: tuple[TensorEntry, ...]) -> None:
        super()._take_tensors(segment, entries)
        self.touched_bytes = resident_bytes()

    def tell_touched_bytes(self) -> int:
        return self.touched_bytes


def resident_bytes() -> int:
    """Of the segments that this process has mapped, by its page table."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = SEGMENT in line
        elif inside and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total
