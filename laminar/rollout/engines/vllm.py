"""Serves the Engine protocol with vLLM: AsyncLLM in the replica's event loop, its scheduler and workers beside it.

    submit -> unsent --feeder--> AsyncLLM -> EngineCore -> workers
                                    │ one output a request, one record a step
    next() <- deltas of all requests ◄───── stepped ◄───────┘

vLLM has no batched interface, but it says when a step's outputs are all in (its stat logger hears of every step). So
one wait serves all requests, and no task stands between.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.output_processor import RequestOutputCollector  # pyright: ignore[reportMissingImports]

from laminar.config import VllmEngineConfig
from laminar.control.messages import DecodeCost
from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.admission import Limits, refuse_impossible
from laminar.rollout.engines.architecture import Architecture, tensor_shapes
from laminar.rollout.engines.engine import Capabilities, Delta, EngineStats, ExportedKv, Request
from laminar.rollout.engines.published import check_probe, refuse_misfits, refuse_without_probe
from laminar.rollout.engines.vllm_process import GONE, VllmProcess
from laminar.rollout.engines.vllm_requests import delta_of, refuse_near_greedy, sampling_of, scoring

PREFIX_RESET_DEADLINE_S = 10.0
"""For the blocks of requests that were just aborted to come free."""
PREFIX_RESET_RETRY_S = 0.02
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
"""What the dtype served can keep; a publisher's tolerance is about the dtype that it published in."""


class Alive(msgspec.Struct):
    """A request from submit to its last delta, and where vLLM puts its outputs, once it was sent."""

    request: Request
    name: str
    collector: RequestOutputCollector | None = None


class VllmEngine:
    """Serves on the device that vLLM was installed for (start_vllm makes one); nothing until the first load.

    llm: vLLM's own interface to the same processes.
    stop_token_ids: end every response, besides the request's own.
    """

    def __init__(
        self,
        config: VllmEngineConfig,
        process: VllmProcess,
        *,
        architecture: Architecture,
        limits: Limits,
        decode_cost: DecodeCost,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._process = process
        self.llm = process.llm
        self._architecture = architecture
        self._limits = limits
        self._decode_cost = decode_cost
        self._stop_token_ids = tuple(stop_token_ids)
        self._alive: dict[int, Alive] = {}
        self._unsent: deque[Alive] = deque()
        self._given_up: list[str] = []
        """Names of requests that ended with an error here, and that vLLM still has to be told to stop."""
        self._refused: list[Delta] = []
        """Last deltas of requests that vLLM would not take, not delivered yet."""
        self._work = asyncio.Event()
        self._submitted = asyncio.Event()
        self._talking = asyncio.Lock()
        self._num_submitted = 0
        self._version: int | None = None
        self._feeding = asyncio.get_running_loop().create_task(self._feed())
        self._feeding.add_done_callback(self._feeder_ended)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(noise_by_position=False)

    def submit(self, requests: Sequence[Request]) -> None:
        if self._version is None:
            raise RuntimeError("the engine holds no weights; load a version before submitting requests")
        refuse_impossible(requests, self._alive, self._limits)
        refuse_near_greedy(requests)
        for request in requests:
            # By another name each time: one that comes back after an abort is not the one that was aborted.
            self._num_submitted += 1
            alive = Alive(request, f"{request.id}.{self._num_submitted}")
            self._alive[request.id] = alive
            self._unsent.append(alive)
        self._work.set()
        self._submitted.set()

    async def abort(self, ids: Sequence[int]) -> list[Delta]:
        # Not while one of them is on its way to vLLM, which could not be told yet to stop it.
        async with self._talking:
            aborted = [alive for id_ in ids if (alive := self._alive.pop(id_, None)) is not None]
            self._unsent = deque(alive for alive in self._unsent if alive.request.id in self._alive)
            await self.llm.abort([alive.name for alive in aborted if alive.collector is not None])
        # Who waits for the step of requests that are no more waits for nothing.
        self._process.stepped.set()
        return [self._last_delta(alive) for alive in aborted]

    def export_kv(self, ids: Sequence[int], allocate: Callable[[int], memoryview]) -> dict[int, ExportedKv]:
        """Nothing: between vLLM engines a KV cache moves only through a connector, which docs/vllm.md is about."""
        return {}

    async def next(self) -> list[Delta]:
        """As in Engine; also [] after an abort. Returns all steps since the last call, usually one.

        Without work it waits for as long as there is none, or until vLLM dies. With work, an engine that makes no step
        within engine.step_deadline_s is dead too: a process that hangs ends nothing by itself.
        """
        while not self._alive and not self._refused:
            self._work.clear()
            await self._process.call(self._work.wait(), "it had nothing to do")
        if not self._refused:
            try:
                async with asyncio.timeout(self._config.step_deadline_s):
                    await self._process.stepped.wait()
            except TimeoutError:
                self._process.die(f"vLLM made no step for engine.step_deadline_s={self._config.step_deadline_s:g} s")
        self._process.stepped.clear()
        deltas, self._refused = self._refused, []
        for alive in list(self._alive.values()):
            delta = self._take(alive)
            if delta is not None:
                deltas.append(delta)
                if delta.stop_reason is not None:
                    del self._alive[alive.request.id]
                if delta.stop_reason == "error":
                    self._given_up.append(alive.name)
                    self._submitted.set()
        if not deltas:
            self._process.check_alive()
        return deltas

    async def load(self, leased: LeasedVersion) -> None:
        """As in Engine; also WrongWeights if tensors are missing, unknown or misshapen, and then nothing was written.

        After any other WrongWeights the engine holds no version and refuses requests until one loads.
        """
        version, probe = leased.manifest.version, leased.manifest.probe
        if self._alive or self._refused:
            raise RuntimeError(
                f"version {version} cannot be loaded while {len(self._alive)} requests are alive; abort them, and take "
                "the last deltas from next()"
            )
        async with self._talking:
            await self._give_up()
        refuse_misfits(leased, tensor_shapes(self._architecture), self._architecture.model_type)
        refuse_without_probe(version, probe)
        self._version = None
        entries = msgspec.msgpack.encode(leased.manifest.tensors)
        taking = self.llm.collective_rpc("take_version", args=(leased.path, entries))
        await self._process.call(taking, f"it loaded version {version}")
        await self._process.call(self._drop_prefixes(), f"it dropped the prefixes of the version before {version}")
        await self._process.call(self.llm.update_weight_version(str(version)), f"it was told of version {version}")
        logprobs = await self._process.call(self._score(probe.token_ids), f"version {version} was probed")
        tolerance = max(probe.tolerance, PROBE_TOLERANCE[self._config.dtype])
        check_probe(version, probe, logprobs, tolerance=tolerance)
        self._version = version

    def stats(self) -> EngineStats:
        # vLLM tells at every step, and an abort is none: what it said last may be about requests that are gone.
        stats, num_alive = self._process.stats, len(self._alive)
        num_running = min(stats.num_running, num_alive)
        return EngineStats(
            kv_utilization=stats.kv_utilization if num_alive else 0.0,
            kv_capacity_tokens=self._limits.kv_capacity_tokens,
            num_running=num_running,
            num_waiting=num_alive - num_running,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            version=self._version,
        )

    def decode_cost(self) -> DecodeCost:
        """As measured when it was started."""
        return self._decode_cost

    async def close(self) -> None:
        """End vLLM's processes; a next() that waits raises EngineDied."""
        self._feeding.cancel()
        self._process.close()

    async def _feed(self) -> None:
        """Tell vLLM what to stop, and send what was submitted, in order."""
        while True:
            await self._submitted.wait()
            self._submitted.clear()
            async with self._talking:
                await self._give_up()
                while self._unsent:
                    await self._send(self._unsent.popleft())

    async def _give_up(self) -> None:
        names, self._given_up = self._given_up, []
        await self.llm.abort(names)

    async def _send(self, alive: Alive) -> None:
        request = alive.request
        sampling = sampling_of(request, self._stop_token_ids)
        try:
            alive.collector = await self.llm.add_request(alive.name, tokens_input(list(request.token_ids)), sampling)
        except ValueError as error:
            del self._alive[request.id]
            self._refused.append(Delta(request.id, (), (), stop_reason="error", cause=f"vLLM refused it: {error}"))
            self._process.stepped.set()

    def _feeder_ended(self, feeding: asyncio.Task[None]) -> None:
        if not feeding.cancelled():
            self._process.die(f"vLLM takes no requests any more: {feeding.exception()}")

    def _take(self, alive: Alive) -> Delta | None:
        """What vLLM has put out for it since the last time, if anything."""
        if alive.collector is None:
            return None
        try:
            output = alive.collector.get_nowait()
        except EngineDeadError:
            self._process.die(GONE)
            return None
        return None if output is None else delta_of(alive.request, output, self._version)

    def _last_delta(self, alive: Alive) -> Delta:
        delta = self._take(alive)
        return delta or Delta(request=alive.request.id, token_ids=(), logprobs=(), stop_reason="abort")

    async def _drop_prefixes(self) -> None:
        async with asyncio.timeout(PREFIX_RESET_DEADLINE_S):
            while True:
                if await self.llm.reset_prefix_cache():
                    return
                await asyncio.sleep(PREFIX_RESET_RETRY_S)

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of tokens 1.. given those before them, at temperature 1."""
        self._num_submitted += 1
        scored = []
        async for output in self.llm.generate(tokens_input(list(token_ids)), scoring(), f"probe.{self._num_submitted}"):
            scored = output.prompt_logprobs[1:]
        return [found[token].logprob for found, token in zip(scored, token_ids[1:], strict=True)]
