"""Keeps the KV of live sequences in pools of slots, so that a decode step reads plain slices and never gathers.

    pool 0, slots of 128 tokens   [A][B][C]        rows 0 .. n - 1 are always taken: a sequence that leaves is
    pool 1, slots of 256 tokens   [D]              replaced by the pool's last one, and one that outgrows its
    pool 2, slots of 512 tokens   [E][F]           pool moves to the next, so a short one never pays for a long one

Memory follows need: a slot is less than twice as long as its sequence (but 128 tokens at least), and a pool doubles its
rows when they run out. It keeps them, so that pages stay warm: each pool holds at most twice what it ever needed.
"""

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences

import torch

from laminar.rollout.engines.architecture import Architecture
from laminar.rollout.engines.engine import ExportedKv
from laminar.rollout.engines.sequence import Sequence

NUM_TOKENS_AT_FIRST = 128
NUM_ROWS_AT_FIRST = 4


class Pool:
    """Slots of one length. `cache`: [layers * 2, rows, kv_heads, num_tokens, head_dim], key and value alternating."""

    def __init__(self, architecture: Architecture, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.sequences: list[Sequence] = []
        self._architecture = architecture
        self._allocate(0)

    def append(self, sequence: Sequence) -> int:
        """The row that the sequence takes."""
        if len(self.sequences) == self.cache.shape[1]:
            kept = self.cache
            self._allocate(max(NUM_ROWS_AT_FIRST, 2 * len(self.sequences)))
            self.cache[:, : kept.shape[1]] = kept
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def remove(self, row: int, *, scrub: bool = False) -> None:
        """Free a row; the last sequence moves into it. scrub: the row holds NaN, which would outlive any mask."""
        if scrub:
            self.cache[:, row].zero_()
        last = self.sequences.pop()
        if row < len(self.sequences):
            self.cache[:, row, :, : last.num_cached] = self.cache[:, last.row, :, : last.num_cached]
            self.sequences[row] = last
            last.row = row

    def _allocate(self, num_rows: int) -> None:
        """Zeros, not garbage: a masked position is multiplied by zero, and zero times NaN is NaN."""
        a = self._architecture
        # A tensor made in inference mode could only be written there, and an abort comes at any time.
        with torch.inference_mode(False):
            self.cache = torch.zeros(2 * a.num_layers, num_rows, a.num_kv_heads, self.num_tokens, a.head_dim)
            self.layers = self.cache.unflatten(0, (a.num_layers, 2)).unbind(0)
        """Of each layer [2, rows, kv_heads, num_tokens, head_dim]."""


class KvSlots:
    def __init__(self, architecture: Architecture, *, num_tokens_max: int) -> None:
        self.pools: list[Pool] = []
        a = architecture
        self._token_bytes = 4 * 2 * a.num_layers * a.num_kv_heads * a.head_dim
        num_tokens = NUM_TOKENS_AT_FIRST
        while not self.pools or self.pools[-1].num_tokens < num_tokens_max:
            self.pools.append(Pool(architecture, min(num_tokens, num_tokens_max)))
            num_tokens *= 2

    def sequences(self) -> Iterator[Sequence]:
        """All that hold a slot, in the order of a decode step's rows: pool by pool, row by row."""
        for pool in self.pools:
            yield from pool.sequences

    def place(self, sequence: Sequence) -> None:
        """Give a sequence without a slot one that all its tokens fit."""
        sequence.pool = next(i for i, pool in enumerate(self.pools) if pool.num_tokens >= len(sequence.tokens))
        sequence.row = self.pools[sequence.pool].append(sequence)

    def grow(self, sequence: Sequence) -> None:
        """Move a sequence whose tokens no longer fit its slot into a longer one."""
        source, row = self.pools[sequence.pool], sequence.row
        if len(sequence.tokens) <= source.num_tokens:
            return
        self.place(sequence)
        target = self.pools[sequence.pool]
        target.cache[:, sequence.row, :, : sequence.num_cached] = source.cache[:, row, :, : sequence.num_cached]
        source.remove(row)

    def copy_prefix(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Take over the KV of tokens that both begin with, from where the target's own ends up to `num_tokens`."""
        part = slice(target.num_cached, num_tokens)
        from_cache, to_cache = self.pools[source.pool].cache, self.pools[target.pool].cache
        to_cache[:, target.row, :, part] = from_cache[:, source.row, :, part]
        target.num_cached = num_tokens

    def take_out(self, sequence: Sequence) -> torch.Tensor:
        """A copy of its KV, for put_back(); [layers * 2, kv_heads, num_cached, head_dim]; its slot can go."""
        return self.pools[sequence.pool].cache[:, sequence.row, :, : sequence.num_cached].clone()

    def put_back(self, sequence: Sequence, kept: torch.Tensor) -> None:
        """Give a sequence, which has a slot, the KV of its first tokens."""
        num_tokens = kept.shape[2]
        self.pools[sequence.pool].cache[:, sequence.row, :, :num_tokens] = kept
        sequence.num_cached = num_tokens

    def export(self, sequences: Sequences[Sequence], allocate: Callable[[int], memoryview]) -> dict[int, ExportedKv]:
        """Copy what these have cached: of each [layers * 2, kv_heads, num_cached, head_dim], float32, as in a slot."""
        exported: dict[int, ExportedKv] = {}
        end = 0
        for sequence in sequences:
            num_bytes = sequence.num_cached * self._token_bytes
            exported[sequence.request.id] = ExportedKv(sequence.num_cached, end, num_bytes)
            end += num_bytes
        if end == 0:
            return {}
        memory = allocate(end)
        for sequence in sequences:
            part = exported[sequence.request.id]
            cached = self.pools[sequence.pool].cache[:, sequence.row, :, : sequence.num_cached]
            target = torch.frombuffer(memory, dtype=torch.float32, count=part.num_bytes // 4, offset=part.offset)
            target.view(cached.shape).copy_(cached)
        return exported

    def take_in(self, sequence: Sequence) -> None:
        """Put the cache that a sequence brought along into its slot; its last token is always fed here."""
        if sequence.kv is None:
            return
        num_brought = len(sequence.kv) // self._token_bytes
        num_tokens = min(num_brought, len(sequence.tokens) - 1)
        cache = self.pools[sequence.pool].cache
        with warnings.catch_warnings():
            # It is mapped read-only, and torch would rather write.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            brought = torch.frombuffer(sequence.kv, dtype=torch.float32)
        brought = brought.view(cache.shape[0], cache.shape[2], num_brought, cache.shape[4])
        cache[:, sequence.row, :, :num_tokens] = brought[:, :, :num_tokens]
        sequence.num_cached = num_tokens
        sequence.kv = None

    def free(self, sequence: Sequence, *, scrub: bool = False) -> None:
        self.pools[sequence.pool].remove(sequence.row, scrub=scrub)
        sequence.pool = sequence.row = -1
        sequence.num_cached = 0
