"""What vLLM alone can do wrong: a packed head that goes stale, ranks that read too much, processes of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from laminar.rollout.engines.engine import EngineDied, Request, WrongWeights
from tests.rollout.engines.conftest import make_model
from tests.rollout.engines.contract.comparing import LOGPROB_ERROR_MAX, PROMPT, largest_error
from tests.rollout.engines.contract.conftest import DEADLINE_S, NEEDS_VLLM, ROOMY, WIDE, start_tiny_vllm
from tests.rollout.engines.driving import Response, decode
from tests.rollout.engines.published import publish
from tests.rollout.waiting import reach

pytestmark = list(NEEDS_VLLM)

ROOT = Path(__file__).parents[4]
only_vllm = pytest.mark.parametrize("engines", ["vllm"], indirect=True)
EXTENSIONS = "tests.rollout.engines.contract.vllm_extensions"


def test_the_probe_catches_a_tied_head_that_was_not_packed_anew(run, models):
    """The mend of vllm_worker.py taken out: vLLM goes on with the old embedding as its output head, and says nothing.

    The first load is caught too, as what vLLM started with were random weights.
    """
    model = models["qwen2_tied"]

    async def scenario():
        engine = await start_tiny_vllm(model, worker_extension=f"{EXTENSIONS}.ForgetsTiedHead")
        try:
            with pytest.raises(WrongWeights, match=r"version 1: .*differs"):
                await engine.load(publish(model.reference, version=1))
            return engine.stats().version
        finally:
            await engine.close()

    assert run(scenario()) is None


def test_each_rank_reads_its_own_share_of_the_segment(run, tmp_path):
    """Everything but the norms is split between two ranks, and what a rank does not serve it does not touch.

    Rows are long enough here for the kernel, which maps 16 pages around one that is touched, not to blur that.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = WIDE | {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32, "head_dim": 64}
    shape |= {"num_hidden_layers": 1, "num_key_value_heads": 16, "initializer_range": 0.02}
    model = make_model(Qwen2ForCausalLM, Qwen2Config(**shape, tie_word_embeddings=True), tmp_path, seed=0)
    leased = publish(model.reference)
    row_parallel = sum(e.num_bytes for e in leased.manifest.tensors if "o_proj" in e.name or "down_proj" in e.name)

    async def scenario():
        engine = await start_tiny_vllm(model, tensor_parallel_size=2, worker_extension=f"{EXTENSIONS}.CountsPages")
        try:
            await engine.load(leased)
            return await engine.llm.collective_rpc("tell_touched_bytes")
        finally:
            await engine.close()

    touched = run(scenario())
    assert len(touched) == 2
    total = leased.manifest.num_bytes
    # Half of every row of these is a run of pages of its own, at most twice as long with those mapped around it.
    upper = 0.5 * (total - row_parallel) + row_parallel
    assert all(0.5 * total <= share <= 1.05 * upper for share in touched), (touched, total, row_parallel)


@pytest.mark.parametrize(
    ("name", "number"),
    [("EngineCore", signal.SIGKILL), ("Worker", signal.SIGKILL), ("EngineCore", signal.SIGSTOP)],
    ids=["scheduler killed", "worker killed", "scheduler hung"],
)
def test_an_engine_that_dies_says_so_and_keeps_what_it_has_streamed(run, models, name, number):
    """A death within a second; a hang within engine.step_deadline_s."""
    model = models["qwen2_tied"]
    requests = [Request(id_, PROMPT, 1500, seed=id_) for id_ in range(2)]

    async def scenario():
        engine = await start_tiny_vllm(model, step_deadline_s=5.0)
        try:
            await engine.load(publish(model.reference))
            responses = {request.id: Response() for request in requests}
            engine.submit(requests)
            await take(engine, responses, until=lambda: all(len(r.token_ids) >= 20 for r in responses.values()))
            victim = vllm_process(name)
            victim.send_signal(number)
            died_at_s = time.monotonic()
            with pytest.raises(EngineDied):
                await take(engine, responses, until=lambda: False)
            return list(responses.values()), time.monotonic() - died_at_s, victim
        finally:
            for process in vllm_processes():
                process.send_signal(signal.SIGCONT)
            await engine.close()

    responses, noticed_after_s, victim = run(scenario())
    assert all(20 <= len(response.token_ids) < 1500 and response.stop_reason is None for response in responses)
    assert largest_error(model, requests, responses) < LOGPROB_ERROR_MAX
    if number is signal.SIGKILL:
        assert noticed_after_s < 1.0 * patience()
    psutil.wait_procs([victim], timeout=DEADLINE_S)
    assert not victim.is_running()


def test_a_killed_replica_leaves_no_process_no_file_and_no_shared_memory(run, models, tmp_path):
    """vLLM's own processes would go on without it."""
    before = leftovers()
    script = [sys.executable, "-m", "tests.rollout.engines.contract.vllm_replica", str(models["qwen2_tied"].path)]
    replica = subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    assert replica.stdout.readline() == "up\n"
    processes = psutil.Process(replica.pid).children(recursive=True)
    names = {process.name() for process in processes}
    assert all(any(part in name for name in names) for part in ("EngineCore", "Worker")), names
    os.kill(replica.pid, signal.SIGKILL)
    replica.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []

    async def cleaned():
        # Python's resource tracker, the last of them, removes what is in shared memory.
        await reach("nothing is left in shared memory", lambda: leftovers()[0] == before[0])

    run(cleaned())
    from laminar.rollout.engines.vllm_folder import remove_abandoned

    remove_abandoned()
    assert leftovers() == before


@only_vllm
def test_a_temperature_that_vllm_would_change_is_refused(run, make_engine, model):
    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference))
        with pytest.raises(ValueError, match=r"temperature 0.001; .*0.01 and above"):
            engine.submit([Request(1, PROMPT, 5, temperature=0.001)])

    run(scenario())


@only_vllm
def test_a_version_that_does_not_fit_is_refused_before_anything_is_overwritten(run, make_engine, models):
    model, other = models["qwen2_tied"], models["qwen2_untied"]
    request = Request(1, PROMPT, 20)

    async def scenario():
        engine = await make_engine(model)
        await engine.load(publish(model.reference, version=1))
        with pytest.raises(WrongWeights, match=r"version 2 does not fit the qwen2 .*not of this model: lm_head.weight"):
            await engine.load(publish(other.reference, version=2))
        assert engine.stats().version == 1
        return await decode(engine, [request])

    assert largest_error(model, [request], run(scenario())) < LOGPROB_ERROR_MAX


@only_vllm
def test_what_one_engine_can_hold_is_what_it_says(run, make_engine, model):
    """vLLM keeps one block for itself; the budget that is asked for is nevertheless whole."""

    async def scenario():
        engine = await make_engine(model)
        cost = engine.decode_cost()
        return engine.stats().kv_capacity_tokens, cost

    capacity, cost = run(scenario())
    assert capacity == ROOMY["kv_capacity_tokens"]
    assert 0 < cost.floor_s + cost.per_running_s < 10.0


async def take(engine, responses: dict[int, Response], *, until: Callable[[], bool]) -> None:
    while not until():
        for delta in await engine.next():
            responses[delta.request].take(delta)


def vllm_processes() -> list[psutil.Process]:
    """Of the engines that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")]


def vllm_process(name: str) -> psutil.Process:
    """Of the engine that was started last."""
    found = [p for p in vllm_processes() if name in p.name()]
    return max(found, key=lambda process: process.create_time())


def patience() -> float:
    """How much slower than an idle machine this one is, by its load; deadlines of a second are about the former."""
    return max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def leftovers() -> tuple[set[str], set[str]]:
    """In shared memory, and in the folder for temporary files."""
    shared = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "sem.", "vllm"))}
    return shared, {path.name for path in Path("/tmp").glob("laminar-vllm-*")}
