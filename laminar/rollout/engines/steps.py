"""Runs the two halves of an engine step: prompts are taken in by chunks, then every ready sequence gets a token."""

from collections.abc import Iterator
from itertools import groupby

import torch

from laminar.rollout.engines.attention import FreshPrompts, NextTokens, PromptChunk
from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.sampling import sample
from laminar.rollout.engines.sequence import Sequence
from laminar.rollout.engines.transformer import Transformer

# Prompt tokens of all sequences that one step takes in, in chunks of one: longer, and those that decode would stall.
NUM_CHUNKS_PER_STEP_MAX = 8
# Padded tokens of one forward over fresh prompts: beyond, activations leave the CPU's cache.
NUM_TOKENS_PER_FORWARD_MAX = 2048
# Fresh prompts share a forward while the shortest has this share of the longest's tokens.
FILLED_SHARE_MIN = 0.75


def prefill(transformer: Transformer, slots: KvSlots, running: list[Sequence], *, chunk_tokens: int) -> int:
    """Compute KV of tokens before the last, at most `chunk_tokens` a sequence; returns how many were computed.

    Of sequences with the same prompt only the one that is furthest computes it; the others take its KV over.
    """
    unready = [sequence for sequence in running if sequence.num_missing > 1]
    if not unready:
        return 0
    furthest: dict[tuple[int, ...], Sequence] = {}
    for sequence in running:
        if sequence.num_cached > furthest.setdefault(sequence.prompt, sequence).num_cached:
            furthest[sequence.prompt] = sequence
    _share_prefixes(slots, unready, furthest)
    due = [sequence for sequence in unready if sequence.num_missing > 1 and not _waits(sequence, furthest)]
    num_tokens = 0
    fresh: list[Sequence] = []
    for sequence in due:
        if num_tokens >= NUM_CHUNKS_PER_STEP_MAX * chunk_tokens:
            break
        num_tokens += _num_due(sequence, chunk_tokens)
        if sequence.num_cached == 0:
            fresh.append(sequence)
        else:
            _take_in_chunk(transformer, slots, sequence, _num_due(sequence, chunk_tokens))
    for batch in _similar(fresh, chunk_tokens):
        _take_in_fresh(transformer, slots, batch, chunk_tokens)
    _share_prefixes(slots, unready, furthest)
    return num_tokens


def decode(transformer: Transformer, slots: KvSlots) -> list[tuple[Sequence, int, float]]:
    """Feed each sequence's next token; returns a new token and its log-prob for those whose newest one that was.

    The sequences themselves only learn that their newest token is cached; appending is the caller's. One that is still
    taking in its prompt is fed along, for the rows of a pool to stay one slice: what that writes is right, and is
    written once more by its next chunk.
    """
    rows = list(slots.sequences())
    ready = [row for row, sequence in enumerate(rows) if sequence.num_missing == 1]
    if not ready:
        return []
    positions = [sequence.num_cached for sequence in rows]
    fed = [sequence.tokens[position] for sequence, position in zip(rows, positions, strict=True)]
    token_ids, at = torch.tensor([fed, positions]).unbind(0)
    x = transformer.forward(token_ids, at, NextTokens(slots.pools, positions, at))
    if len(ready) < len(rows):
        x, rows = x[ready], [rows[row] for row in ready]
    requests = [sequence.request for sequence in rows]
    noise = [sequence.noise.at(sequence.request.position + sequence.num_new) for sequence in rows]
    tokens, logprobs = sample(transformer.logits(x), requests, noise)
    for sequence in rows:
        sequence.num_cached += 1
    return list(zip(rows, tokens, logprobs, strict=True))


def _share_prefixes(slots: KvSlots, unready: list[Sequence], furthest: dict[tuple[int, ...], Sequence]) -> None:
    for sequence in unready:
        source = furthest[sequence.prompt]
        num_tokens = min(source.num_cached, sequence.num_shared)
        if source is not sequence and num_tokens > sequence.num_cached:
            slots.copy_prefix(source, sequence, num_tokens)


def _waits(sequence: Sequence, furthest: dict[tuple[int, ...], Sequence]) -> bool:
    """Whether another is just taking in what this one will share."""
    source = furthest[sequence.prompt]
    return source is not sequence and source.num_missing > 1 and sequence.num_cached < sequence.num_shared


def _num_due(sequence: Sequence, chunk_tokens: int) -> int:
    return min(chunk_tokens, sequence.num_missing - 1)


def _take_in_chunk(transformer: Transformer, slots: KvSlots, sequence: Sequence, num_tokens: int) -> None:
    start = sequence.num_cached
    attend = PromptChunk(slots.pools[sequence.pool], sequence.row, start, num_tokens)
    token_ids = torch.tensor(sequence.tokens[start : start + num_tokens])
    transformer.forward(token_ids, torch.arange(start, start + num_tokens), attend)
    sequence.num_cached += num_tokens


def _take_in_fresh(transformer: Transformer, slots: KvSlots, batch: list[Sequence], chunk_tokens: int) -> None:
    """All of one pool; padded on the right to the longest."""
    num_due = [_num_due(sequence, chunk_tokens) for sequence in batch]
    width = max(num_due)
    padded = [s.tokens[:num] + [0] * (width - num) for s, num in zip(batch, num_due, strict=True)]
    attend = FreshPrompts(slots.pools[batch[0].pool], [sequence.row for sequence in batch], width)
    transformer.forward(torch.tensor(padded).flatten(), torch.arange(width).repeat(len(batch)), attend)
    for sequence, num in zip(batch, num_due, strict=True):
        sequence.num_cached = num


def _similar(fresh: list[Sequence], chunk_tokens: int) -> Iterator[list[Sequence]]:
    """Split into batches of one pool and of similar length, each small enough for one forward."""
    fresh.sort(key=lambda sequence: (sequence.pool, -_num_due(sequence, chunk_tokens)))
    for _, of_one_pool in groupby(fresh, key=lambda sequence: sequence.pool):
        batch: list[Sequence] = []
        for sequence in of_one_pool:
            width = _num_due(batch[0], chunk_tokens) if batch else 0
            too_short = _num_due(sequence, chunk_tokens) < FILLED_SHARE_MIN * width
            if batch and (too_short or (len(batch) + 1) * width > NUM_TOKENS_PER_FORWARD_MAX):
                yield batch
                batch = []
            batch.append(sequence)
        yield batch
