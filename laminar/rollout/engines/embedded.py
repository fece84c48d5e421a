"""Serves the Engine protocol with Laminar's own continuous-batching decoder, inside the caller's event loop.

There is no thread: `next()` computes a step in place (a hop to an executor costs 0.1 to 0.2 ms, a third of a small
step) and gives way to the loop between steps. One core is used if the process says torch.set_num_threads(1), which it
should: two threads on two busy cores collapse.

    submit -> waiting -> running --prefill--> decode --> deltas -> [held to the paced rate] -> next()
                 ^----- preempted --'             '- stopped, may go on -> kept, until it does or room is needed
"""

import asyncio
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from pathlib import Path

import msgspec
import torch

from laminar.config import EmbeddedEngineConfig
from laminar.control.messages import DecodeCost
from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.admission import Limits, refuse_impossible
from laminar.rollout.engines.architecture import read_stop_token_ids
from laminar.rollout.engines.batch import Batch
from laminar.rollout.engines.calibration import measure_decode_cost
from laminar.rollout.engines.engine import Capabilities, Delta, EngineDied, EngineStats, ExportedKv, Request, StopReason
from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.pacing import Pacer
from laminar.rollout.engines.sequence import Sequence
from laminar.rollout.engines.steps import decode, prefill
from laminar.rollout.engines.transformer import Transformer


class EmbeddedEngine:
    """Decodes on CPU in float32, whatever dtype is published.

    stop_token_ids: end every response, besides the request's own; None: those of the model's generation_config.json.
    Like the tokens before it, the stop token is delivered. Serves nothing until the first load.
    """

    def __init__(
        self, config: EmbeddedEngineConfig, model_path: Path, *, stop_token_ids: Sequences[int] | None = None
    ) -> None:
        self._config = config
        self._transformer = Transformer(model_path)
        self._stop_token_ids = frozenset(read_stop_token_ids(model_path) if stop_token_ids is None else stop_token_ids)
        architecture = self._transformer.architecture
        num_blocks = config.kv_capacity_tokens // config.block_tokens
        self._limits = Limits(
            vocab_size=architecture.vocab_size,
            kv_capacity_tokens=config.kv_capacity_tokens,
            num_positions_max=architecture.num_positions_max,
            num_tokens_max=min(num_blocks * config.block_tokens, architecture.num_positions_max),
        )
        if self._limits.num_tokens_max < 2:
            raise ValueError(
                f"engine.kv_capacity_tokens={config.kv_capacity_tokens} is not one block of "
                f"engine.block_tokens={config.block_tokens}; raise the former"
            )
        slots = KvSlots(architecture, num_tokens_max=self._limits.num_tokens_max)
        self._slots = slots
        self._batch = Batch(
            slots,
            num_slots=config.num_slots,
            num_blocks=num_blocks,
            block_tokens=config.block_tokens,
            kept_share_max=config.kept_kv_share_max,
        )
        self._pacer = Pacer(config.paced, kv_capacity_tokens=config.kv_capacity_tokens) if config.paced else None
        self._alive: dict[int, Sequence] = {}
        self._undelivered: list[Delta] | None = None
        """Of a step that is computed and held back, or whose next() was cancelled."""
        self._work = asyncio.Event()
        self._version: int | None = None
        self._num_steps = 0
        self._decode_cost: DecodeCost | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(noise_by_position=True)

    def submit(self, requests: Sequences[Request]) -> None:
        if self._version is None:
            raise RuntimeError("the engine holds no weights; load a version before submitting requests")
        refuse_impossible(requests, self._alive, self._limits)
        if self._pacer and not self._alive and self._undelivered is None:
            self._pacer.restart()
        for request in requests:
            self._transformer.reserve_positions(len(request.token_ids) + request.num_new_tokens_max)
            # Not in the request, which would keep the memory for as long as it lives.
            sequence = Sequence(msgspec.structs.replace(request, kv=None), kv=request.kv)
            self._alive[request.id] = sequence
            self._batch.waiting.append(sequence)
        self._work.set()

    async def abort(self, ids: Sequences[int]) -> list[Delta]:
        aborted: list[Delta] = []
        for id_ in ids:
            self._batch.give_up(id_)
            sequence = self._alive.pop(id_, None)
            if sequence is not None:
                self._batch.remove(sequence)
                held = self._take_undelivered(id_)
                aborted.append(
                    Delta(
                        request=id_,
                        token_ids=held.token_ids if held else (),
                        logprobs=held.logprobs if held else (),
                        stop_reason="abort",
                    )
                )
        return aborted

    def export_kv(self, ids: Sequences[int], allocate: Callable[[int], memoryview]) -> dict[int, ExportedKv]:
        """As in Engine; the layout is KvSlots.export's."""
        held = [s for id_ in ids if (s := self._alive.get(id_)) is not None and s.num_cached > 0]
        return self._slots.export(held, allocate)

    async def next(self) -> list[Delta]:
        """As in Engine. Cancelled while it waits, it loses nothing: the next call returns what this one would have.

        Without work it waits for as long as there is none, since idleness is no failure; close() ends the wait.
        """
        while self._undelivered is None:
            if self._closed:
                raise EngineDied("the engine is closed")
            if not self._alive:
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(0)
            if self._alive:
                self._undelivered = self._step()
        if self._pacer:
            await self._pacer.hold()
        deltas, self._undelivered = self._undelivered, None
        return deltas

    async def load(self, leased: LeasedVersion) -> None:
        """As in Engine; also WrongWeights if tensors are missing, unknown or misshapen, and then nothing was written.

        After any other WrongWeights the engine holds no version and refuses requests until one loads. KV that was kept
        for requests that might go on is given up: it is the old version's. The lease may end on return.
        """
        if self._alive or self._undelivered:
            raise RuntimeError(
                f"version {leased.manifest.version} cannot be loaded while {len(self._alive)} requests are alive; "
                "abort them, and take the last deltas from next()"
            )
        self._transformer.weights.refuse_misfits(leased)
        self._version = None
        for request in tuple(self._batch.kept):
            self._batch.give_up(request)
        with torch.inference_mode():
            self._transformer.load(leased)
        self._version = leased.manifest.version

    def stats(self) -> EngineStats:
        batch = self._batch
        return EngineStats(
            kv_utilization=batch.num_used_blocks / batch.num_blocks,
            kv_capacity_tokens=self._config.kv_capacity_tokens,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            num_preemptions=batch.num_preemptions,
            num_steps=self._num_steps,
            version=self._version,
            num_kept=len(batch.kept),
        )

    def decode_cost(self) -> DecodeCost:
        """The paced profile's; else measured on the first call, which takes some tens of steps, and then kept."""
        if self._pacer:
            return self._pacer.profile.decode
        if self._decode_cost is None:
            with torch.inference_mode():
                self._decode_cost = measure_decode_cost(
                    self._transformer, num_slots=self._config.num_slots, num_tokens_max=self._limits.num_tokens_max
                )
        return self._decode_cost

    async def close(self) -> None:
        """Drop every request; a next() that waits raises EngineDied."""
        await self.abort(list(self._alive))
        self._closed = True
        self._work.set()

    @torch.inference_mode()
    def _step(self) -> list[Delta]:
        started_s = time.perf_counter()
        self._num_steps += 1
        batch = self._batch
        batch.reserve_next_tokens()
        batch.admit()
        num_running, num_kv_tokens = len(batch.running), batch.num_kv_tokens
        num_prefill_tokens = prefill(
            self._transformer, self._slots, batch.running, chunk_tokens=self._config.prefill_chunk_tokens
        )
        deltas = [self._extend(*drawn) for drawn in decode(self._transformer, self._slots)]
        if self._pacer:
            self._pacer.charge(
                started_s=started_s,
                num_running=num_running,
                num_kv_tokens=num_kv_tokens,
                num_prefill_tokens=num_prefill_tokens,
            )
        return deltas

    def _extend(self, sequence: Sequence, token: int, logprob: float) -> Delta:
        request = sequence.request
        if not math.isfinite(logprob):
            self._end(sequence, scrub=True)
            position = request.position + sequence.num_new
            cause = f"version {self._version} gave log-prob {logprob} for response token {position}"
            return Delta(request=request.id, token_ids=(), logprobs=(), stop_reason="error", cause=cause)
        sequence.tokens.append(token)
        sequence.num_new += 1
        stop_reason: StopReason | None = None
        if token in self._stop_token_ids or token in request.stop_token_ids:
            stop_reason = "stop"
        elif sequence.num_new == request.num_new_tokens_max:
            stop_reason = "length"
        if stop_reason == "stop" and request.may_continue:
            self._batch.keep(sequence)
            del self._alive[request.id]
        elif stop_reason:
            self._end(sequence)
        return Delta(request=request.id, token_ids=(token,), logprobs=(logprob,), stop_reason=stop_reason)

    def _end(self, sequence: Sequence, *, scrub: bool = False) -> None:
        self._batch.remove(sequence, scrub=scrub)
        del self._alive[sequence.request.id]

    def _take_undelivered(self, id_: int) -> Delta | None:
        deltas = self._undelivered or []
        for index, delta in enumerate(deltas):
            if delta.request == id_:
                return deltas.pop(index)
        return None
