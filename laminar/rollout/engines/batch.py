"""Decides which requests run: first come first served, within the slots and the logical KV blocks."""

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.sequence import Sequence

# Blocks that admission leaves free, so that a newcomer is not preempted by the next token of another.
FREE_BLOCKS_SHARE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """KV of a request that has stopped and may go on: blocks, but no slot, so that no decode step computes on it."""

    token_ids: list[int]
    cache: Tensor
    num_blocks: int


class Batch:
    """The waiting and the running requests. Every running one holds a slot and blocks for all of its tokens.

    When blocks run out, KV that is kept for requests that may go on is given up first, oldest first. Then the request
    admitted last gives up its own and goes to the front of the queue with its tokens; it is computed anew when it comes
    back. kept_share_max: of all blocks, those that may be kept.
    """

    def __init__(
        self, slots: KvSlots, *, num_slots: int, num_blocks: int, block_tokens: int, kept_share_max: float
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.kept: dict[int, Kept] = {}
        """By request, oldest first."""
        self._num_kept_blocks_max = int(kept_share_max * num_blocks)
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
                    if not self._give_up_oldest():
                        self._preempt_last()
                    continue
                self._hold_blocks(sequence, sequence.num_blocks + 1)
            self._slots.grow(sequence)
            index += 1

    def admit(self) -> None:
        while self.waiting and len(self.running) < self._num_slots:
            sequence = self.waiting[0]
            kept = self._kept_for(sequence)
            num_new_blocks = self._num_blocks_for(sequence) - (kept.num_blocks if kept else 0)
            spare = int(FREE_BLOCKS_SHARE * self.num_blocks) if self.running else 0
            while self.num_used_blocks + num_new_blocks + spare > self.num_blocks:
                if not self._give_up_oldest(but=sequence.request.id):
                    return
            self.running.append(self.waiting.popleft())
            self.give_up(sequence.request.id)
            self._hold_blocks(sequence, self._num_blocks_for(sequence))
            self._slots.place(sequence)
            if kept:
                self._slots.put_back(sequence, kept.cache)
            else:
                self._slots.take_in(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Take out a running request that has stopped, but keep its KV, within the share."""
        kept = Kept(sequence.tokens, self._slots.take_out(sequence), sequence.num_blocks)
        self.remove(sequence)
        self.kept[sequence.request.id] = kept
        self.num_used_blocks += kept.num_blocks
        while sum(kept.num_blocks for kept in self.kept.values()) > self._num_kept_blocks_max:
            self._give_up_oldest()

    def give_up(self, request: int) -> None:
        """Keep nothing for this one any more."""
        if (kept := self.kept.pop(request, None)) is not None:
            self.num_used_blocks -= kept.num_blocks

    def remove(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Take out a request that ended, wherever it is. scrub: its KV holds NaN."""
        if sequence.pool < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._hold_blocks(sequence, 0)
        self._slots.free(sequence, scrub=scrub)

    def _kept_for(self, sequence: Sequence) -> Kept | None:
        """What is kept for it, if it does go on from there."""
        kept = self.kept.get(sequence.request.id)
        if kept is not None and sequence.tokens[: len(kept.token_ids)] != kept.token_ids:
            self.give_up(sequence.request.id)
            return None
        return kept

    def _give_up_oldest(self, *, but: int | None = None) -> bool:
        """Whether there was one."""
        oldest = next((request for request in self.kept if request != but), None)
        if oldest is not None:
            self.give_up(oldest)
        return oldest is not None

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
