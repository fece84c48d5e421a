"""Measures a vLLM replica beside plain vLLM: the same engine process, the same requests, in turns.

    replica    tasks ─► RolloutWorker ─► VllmEngine ─► AsyncLLM          reports taken every 0.1 s, as by the driver
    plain      requests ─► a task each ─► AsyncLLM.generate              tokens and log-probs taken from its outputs

Both talk to one AsyncLLM, so what differs is what Laminar adds. Responses are of equal length, four times as many as
decode at once. A pair is one run of each, one after the other, and the ratio is the median of the pairs': a busy
machine slows both. CPU seconds are those of the replica's process and of vLLM's.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import psutil
import torch
from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

from laminar.bench.engine import VOCAB_SIZE, make_model, publish
from laminar.config import VllmEngineConfig
from laminar.control.messages import CommandId, MachineId, PromptId, ReplicaId, ReplicaReport, TrajectoryId
from laminar.data.records import Prompt, Task
from laminar.relay.chunks import version_checksum
from laminar.relay.manifest import LeasedVersion
from laminar.relay.segments import Segment
from laminar.rollout.engines.sampling import seed_at
from laminar.rollout.engines.vllm import VllmEngine
from laminar.rollout.engines.vllm_setup import start_vllm
from laminar.rollout.episode import EpisodeRules
from laminar.rollout.worker import RolloutWorker

PROMPT_TOKENS = 23
RESPONSE_TOKENS = 96
REPORT_INTERVAL_S = 0.1
NUM_PAIRS = 9
BATCHES = (8, 64)
NUM_LOADS = 9
NUM_REQUESTS_PER_SLOT = 4


class Throughput(msgspec.Struct, frozen=True):
    """batch: trajectories that decode at once."""

    batch: int
    tokens_per_s: float
    vllm_tokens_per_s: float
    ratio: float
    cpu_s_per_token: float
    vllm_cpu_s_per_token: float
    num_pairs: int


class LoadTime(msgspec.Struct, frozen=True):
    """load_s: from the segment into vLLM's workers and packed there, prefixes dropped, the probe passed."""

    num_bytes: int
    load_s: float
    memcpy_s: float
    num_loads: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench vllm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="runs of each, of which the median counts")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        leased = _lend(publish(make_model(Path(folder))))
        asyncio.run(_measure(Path(folder), leased, options.pairs, as_json=options.json))
    return 0


async def _measure(folder: Path, leased: LeasedVersion, num_pairs: int, *, as_json: bool) -> None:
    config = VllmEngineConfig(
        device="cpu", dtype="float32", num_slots=max(BATCHES), kv_capacity_tokens=32768, eager=True
    )
    engine = await start_vllm(config, folder, num_tokens_max=1024, stop_token_ids=())
    worker = _make_worker(engine, leased)
    worker.start()
    await worker.load(CommandId(0), leased.manifest.version)
    try:
        for batch in BATCHES:
            pairs = [await _run_pair(engine, worker, batch, index) for index in range(num_pairs + 1)]
            # The first pair warms both up.
            _print(_compare(batch, pairs[1:]), as_json=as_json)
        _print(await _measure_loads(engine, leased), as_json=as_json)
    finally:
        await worker.close()


async def _run_pair(engine: VllmEngine, worker: RolloutWorker, batch: int, index: int) -> tuple["Spent", "Spent"]:
    """The replica's, then the plain one's; which goes first changes from pair to pair."""
    requests = _make_requests(batch)
    if index % 2:
        plain = await _timed(_run_plain(engine, requests))
        return await _timed(_run_replica(worker, requests)), plain
    return await _timed(_run_replica(worker, requests)), await _timed(_run_plain(engine, requests))


def _make_requests(batch: int) -> list[Task]:
    """Prompts that differ, so that no engine finds one in its prefix cache; seeds too."""
    num_requests = NUM_REQUESTS_PER_SLOT * batch
    rng = np.random.default_rng()
    prompts = rng.integers(VOCAB_SIZE, size=(num_requests, PROMPT_TOKENS)).tolist()
    return [
        Task(
            trajectory=TrajectoryId(index),
            attempt=0,
            prompt=Prompt(PromptId(index), tuple(token_ids), "bench", "", {}),
            response_token_ids=(),
            loss_mask=(),
            seed=index,
        )
        for index, token_ids in enumerate(prompts)
    ]


def _make_worker(engine: VllmEngine, leased: LeasedVersion) -> RolloutWorker:
    @contextmanager
    def lease(version: int) -> Iterator[LeasedVersion]:
        assert version == leased.manifest.version
        yield leased

    rules = EpisodeRules(response_tokens_max=RESPONSE_TOKENS, stop_token_ids=())
    return RolloutWorker(
        ReplicaId(0),
        MachineId(0),
        engine,
        lease,
        rules=rules,
        evaluation_rules=rules,
        report_interval_s=REPORT_INTERVAL_S,
    )


async def _run_replica(worker: RolloutWorker, tasks: Sequence[Task]) -> int:
    """As control would have it: a closed batch, and reports until it has ended; returns the tokens."""
    worker.generate(tasks, evaluation=False)
    num_left, num_tokens = len(tasks), 0
    while num_left:
        for report in await worker.reports():
            num_tokens += sum(len(delta.token_ids) for delta in report.tokens)
            if isinstance(report.event, ReplicaReport):
                assert not report.event.failed, report.event.failed
                num_left -= len(report.event.finished)
    return num_tokens


async def _run_plain(engine: VllmEngine, tasks: Sequence[Task]) -> int:
    """As vLLM's own examples have it: a task a request, with tokens and their log-probs."""
    sampling = [
        SamplingParams(
            max_tokens=RESPONSE_TOKENS,
            seed=seed_at(task.seed, 0),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for task in tasks
    ]

    async def respond(index: int) -> int:
        token_ids: list[int] = []
        logprobs: list[float] = []
        prompt = tokens_input(list(tasks[index].prompt.token_ids))
        async for output in engine.llm.generate(prompt, sampling[index], f"plain.{uuid4()}"):
            (completion,) = output.outputs
            token_ids += completion.token_ids
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            logprobs += [found[token_id].logprob for found, token_id in pairs]
        assert len(logprobs) == len(token_ids)
        return len(token_ids)

    return sum(await asyncio.gather(*map(respond, range(len(tasks)))))


async def _measure_loads(engine: VllmEngine, leased: LeasedVersion) -> LoadTime:
    """Beside the copy of the same bytes between two warm pieces of memory of this process."""
    source = np.frombuffer(leased.data, dtype=np.uint8)
    target = np.zeros_like(source)
    load_s, memcpy_s = [], []
    for _ in range(NUM_LOADS):
        began_s = time.perf_counter()
        await engine.load(leased)
        load_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        target[:] = source
        memcpy_s.append(time.perf_counter() - began_s)
    return LoadTime(
        num_bytes=len(leased.data),
        load_s=statistics.median(load_s),
        memcpy_s=statistics.median(memcpy_s),
        num_loads=NUM_LOADS,
    )


class Spent(msgspec.Struct, frozen=True):
    num_tokens: int
    wall_s: float
    cpu_s: float


async def _timed(run: Coroutine[Any, Any, int]) -> Spent:
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    num_tokens = await run
    return Spent(num_tokens, time.perf_counter() - began_s, _cpu_s() - began_cpu_s)


def _cpu_s() -> float:
    """Of this process and all below it, so far."""
    here = psutil.Process()
    return sum(p.cpu_times().user + p.cpu_times().system for p in (here, *here.children(recursive=True)))


def _compare(batch: int, pairs: Sequence[tuple[Spent, Spent]]) -> Throughput:
    for ours, plain in pairs:
        assert ours.num_tokens == plain.num_tokens == NUM_REQUESTS_PER_SLOT * batch * RESPONSE_TOKENS
    return Throughput(
        batch=batch,
        tokens_per_s=round(statistics.median(ours.num_tokens / ours.wall_s for ours, _ in pairs), 1),
        vllm_tokens_per_s=round(statistics.median(plain.num_tokens / plain.wall_s for _, plain in pairs), 1),
        ratio=round(statistics.median(plain.wall_s / ours.wall_s for ours, plain in pairs), 3),
        cpu_s_per_token=round(statistics.median(ours.cpu_s / ours.num_tokens for ours, _ in pairs), 7),
        vllm_cpu_s_per_token=round(statistics.median(plain.cpu_s / plain.num_tokens for _, plain in pairs), 7),
        num_pairs=len(pairs),
    )


def _lend(published: LeasedVersion) -> LeasedVersion:
    """As a relay would, in memory that vLLM's processes can open; it stays until this process ends."""
    segment = Segment()
    segment.reserve(len(published.data))
    segment.view[: len(published.data)] = published.data
    return LeasedVersion(
        published.manifest,
        version_checksum(published.data, published.manifest.chunk_bytes),
        published.data,
        path=f"/proc/{os.getpid()}/fd/{segment.reader_fd}",
    )


def _print(measured: Throughput | LoadTime, *, as_json: bool) -> None:
    fields = msgspec.structs.asdict(measured)
    line = json.dumps(fields) if as_json else "  ".join(f"{name} {value:g}" for name, value in fields.items())
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
