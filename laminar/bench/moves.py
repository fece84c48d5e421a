"""Measures what a move within a machine costs, with the KV cache and without, on the embedded engine.

From the order to release until every trajectory has its next token at the target: export, checksum, shared memory,
checksum again, import; or, without, the prefill of prompt and response so far. Both engines are in this process, so the
messages between replicas are left out: they are the same in both cases. Turns about, the median counts.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from laminar.bench.engine import VOCAB_SIZE, make_model, publish
from laminar.config import EmbeddedEngineConfig
from laminar.control.messages import MachineId, TrajectoryId
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from laminar.rollout.kv_shelf import KvShelf

NUM_ROUNDS = 9
CONTEXTS = (64, 256, 1024)
NUM_TRAJECTORIES = (1, 16)
NUM_TOKENS_DECODED = 4
VERSION = 1


class Move(msgspec.Struct, frozen=True):
    """context_tokens: prompt and response so far, of each trajectory."""

    num_trajectories: int
    context_tokens: int
    kv_bytes: int
    with_kv_s: float
    prefilled_s: float
    ratio: float
    num_rounds: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench moves", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="repetitions, of which the median counts")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        source, target = (_make_engine(Path(folder)) for _ in range(2))
        for engine in (source, target):
            asyncio.run(engine.load(publish(model)))
        for num_trajectories in NUM_TRAJECTORIES:
            for context_tokens in CONTEXTS:
                move = asyncio.run(_measure(source, target, num_trajectories, context_tokens, options.rounds))
                sys.stdout.write(_format(move, as_json=options.json) + "\n")
                sys.stdout.flush()
    return 0


def _make_engine(folder: Path) -> EmbeddedEngine:
    config = EmbeddedEngineConfig(num_slots=max(NUM_TRAJECTORIES), kv_capacity_tokens=32768)
    return EmbeddedEngine(config, folder, stop_token_ids=())


async def _measure(
    source: EmbeddedEngine, target: EmbeddedEngine, num_trajectories: int, context_tokens: int, num_rounds: int
) -> Move:
    kv_bytes = 0
    rounds: list[tuple[float, float]] = []
    for _ in range(num_rounds):
        with_kv_s, kv_bytes = await _move(source, target, num_trajectories, context_tokens, with_kv=True)
        prefilled_s, _ = await _move(source, target, num_trajectories, context_tokens, with_kv=False)
        rounds.append((with_kv_s, prefilled_s))
    return Move(
        num_trajectories=num_trajectories,
        context_tokens=context_tokens,
        kv_bytes=kv_bytes,
        with_kv_s=round(statistics.median(with_kv_s for with_kv_s, _ in rounds), 6),
        prefilled_s=round(statistics.median(prefilled_s for _, prefilled_s in rounds), 6),
        ratio=round(statistics.median(with_kv_s / prefilled_s for with_kv_s, prefilled_s in rounds), 3),
        num_rounds=num_rounds,
    )


async def _move(
    source: EmbeddedEngine, target: EmbeddedEngine, num_trajectories: int, context_tokens: int, *, with_kv: bool
) -> tuple[float, int]:
    """Seconds, and bytes of KV that moved. Each trajectory has a prompt of its own, so that nothing is shared."""
    requests = [
        Request(
            id=id_,
            token_ids=tuple((31 * id_ + 7 * k) % VOCAB_SIZE for k in range(context_tokens - NUM_TOKENS_DECODED)),
            num_new_tokens_max=2 * NUM_TOKENS_DECODED + 64,
            seed=id_,
        )
        for id_ in range(num_trajectories)
    ]
    tokens = await _decode_some(source, requests, NUM_TOKENS_DECODED)
    ids = [TrajectoryId(request.id) for request in requests]
    shelf = KvShelf(MachineId(0))
    began_s = time.perf_counter()
    parcels = {p.trajectory: p for p in shelf.leave(source, ids, VERSION)} if with_kv else {}
    await source.abort(ids)
    again = [
        msgspec.structs.replace(
            request,
            token_ids=request.token_ids + tuple(tokens[request.id]),
            position=len(tokens[request.id]),
            kv=shelf.take(parcels[TrajectoryId(request.id)], VERSION) if with_kv else None,
        )
        for request in requests
    ]
    await _decode_some(target, again, 1)
    elapsed_s = time.perf_counter() - began_s
    await target.abort(ids)
    shelf.close()
    return elapsed_s, sum(parcel.num_bytes for parcel in parcels.values())


async def _decode_some(engine: EmbeddedEngine, requests: list[Request], num_tokens: int) -> dict[int, list[int]]:
    """Until each has so many tokens; they stay alive."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    engine.submit(requests)
    while any(len(decoded) < num_tokens for decoded in tokens.values()):
        for delta in await engine.next():
            tokens[delta.request] += delta.token_ids
    return tokens


def _format(move: Move, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(msgspec.structs.asdict(move))
    return (
        f"{move.num_trajectories:3d} x {move.context_tokens:5d} tokens  {move.kv_bytes / 2**20:7.1f} MiB  "
        f"with KV {1e3 * move.with_kv_s:8.2f} ms  prefilled {1e3 * move.prefilled_s:8.2f} ms  ratio {move.ratio:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
