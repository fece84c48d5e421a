"""Decides which requests run: first come first served, within the slots and the logical KV blocks."""

from collections import deque

from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.sequence import Sequence

# Blocks that admission leaves free, so that a newcomer is not preempted by the next token of another.
FREE_BLOCKS_SHARE = 0.01


class Batch:
    """The waiting and the running requests. Every running one holds a slot and blocks for all of its tokens.

    When blocks run out, the request admitted last gives up its KV and goes to the front of the queue with its tokens;
    it is computed anew when it comes back.
    """

    def __init__(self, slots: KvSlots, *, num_slots: int, num_blocks: int, block_tokens: int) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_used_blocks = 0
        self.num_blocks = num_blocks
        self._slots = slots
        self._num_slots = num_slots
        self._block_tokens = block_tokens

    @property
    def num_kv_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.running)

    def reserve_next_tokens(self) -> None:
        """Give each running sequence the block and slot that its newest token needs, preempting if none is left."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if len(sequence.tokens) > sequence.num_blocks * self._block_tokens:
                if self.num_used_blocks == self.num_blocks:
                    self._preempt_last()
                    continue
                self._hold_blocks(sequence, sequence.num_blocks + 1)
            self._slots.grow(sequence)
            index += 1

    def admit(self) -> None:
        while self.waiting and len(self.running) < self._num_slots:
            sequence = self.waiting[0]
            num_blocks = self._num_blocks_for(sequence)
            spare = int(FREE_BLOCKS_SHARE * self.num_blocks) if self.running else 0
            if self.num_used_blocks + num_blocks + spare > self.num_blocks:
                return
            self.running.append(self.waiting.popleft())
            self._hold_blocks(sequence, num_blocks)
            self._slots.place(sequence)
            self._slots.take_in(sequence)

    def remove(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Take out a request that ended, wherever it is. scrub: its KV holds NaN."""
        if sequence.pool < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._hold_blocks(sequence, 0)
        self._slots.free(sequence, scrub=scrub)

    def _preempt_last(self) -> None:
        """A request alone always fits (submit refused it otherwise), so this ends before the batch is empty."""
        victim = self.running[-1]
        self.remove(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _hold_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        self.num_used_blocks += num_blocks - sequence.num_blocks
        sequence.num_blocks = num_blocks

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._block_tokens)
