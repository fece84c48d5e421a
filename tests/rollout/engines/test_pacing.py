"""Paced steps keep an accelerator's rate."""

import asyncio
import time

import pytest

from laminar.config import EmbeddedEngineConfig, PacedConfig
from laminar.control.costs import PROFILES, scale_profile
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from laminar.rollout.engines.pacing import Pacer
from tests.rollout.engines.driving import decode, run
from tests.rollout.engines.published import publish

PROMPT = tuple(range(5, 25))


def make(model, time_scale: float) -> EmbeddedEngine:
    paced = PacedConfig(time_scale=time_scale, batch_scale=8.0)
    config = EmbeddedEngineConfig(num_slots=8, kv_capacity_tokens=4096, paced=paced)
    return EmbeddedEngine(config, model.path, stop_token_ids=())


def decode_s(model, time_scale: float, requests: list[Request]) -> float:
    engine = make(model, time_scale)

    async def scenario():
        await engine.load(publish(model.reference))
        started_s = time.perf_counter()
        await decode(engine, requests)
        return time.perf_counter() - started_s

    return run(scenario())


def test_the_rate_holds_though_sleeps_are_coarse(model):
    """40 steps of about 7 ms, each sleep missing up to 1 ms. Above only a generous bound: the machine may be busy."""
    requests = [Request(id_, PROMPT, 40, seed=id_) for id_ in range(4)]
    profile = scale_profile(PROFILES["h800-qwen2.5-32b-tp4"], time_scale=0.2, batch_scale=8.0, kv_capacity_tokens=4096)
    kv_tokens = sum(4 * (len(PROMPT) + step) for step in range(40))
    expected_s = 40 * (profile.decode.floor_s + 4 * profile.decode.per_running_s)
    expected_s += kv_tokens * profile.decode.per_kv_token_s
    expected_s += 19 * 1 * profile.prefill_s_per_token  # four members, one prompt
    elapsed_s = decode_s(model, 0.2, requests)
    assert elapsed_s > 0.98 * expected_s
    assert elapsed_s < 3 * expected_s


def test_time_scale_scales_time(model):
    requests = [Request(1, PROMPT, 20)]
    assert decode_s(model, 2.4, requests) > 2 * decode_s(model, 0.6, requests)


def test_more_trajectories_and_more_context_make_longer_steps():
    pacer = Pacer(PacedConfig(), kv_capacity_tokens=4096)

    def step_s(**charged: int) -> float:
        pacer.restart()
        charge = {"num_running": 1, "num_kv_tokens": 20, "num_prefill_tokens": 0} | charged
        pacer.charge(started_s=100.0, **charge)
        assert pacer.deadline_s is not None
        return pacer.deadline_s - 100.0

    assert step_s(num_running=2) - step_s() == pytest.approx(pacer.profile.decode.per_running_s)
    assert step_s(num_kv_tokens=120) - step_s() == pytest.approx(100 * pacer.profile.decode.per_kv_token_s)
    assert step_s(num_prefill_tokens=50) - step_s() == pytest.approx(50 * pacer.profile.prefill_s_per_token)


def test_lateness_is_caught_up_by_one_step_at_most():
    pacer = Pacer(PacedConfig(), kv_capacity_tokens=4096)
    cost = pacer.profile.decode
    step_s = cost.floor_s + cost.per_running_s

    def charge(started_s: float) -> float:
        pacer.charge(started_s=started_s, num_running=1, num_kv_tokens=0, num_prefill_tokens=0)
        assert pacer.deadline_s is not None
        return pacer.deadline_s

    assert charge(100.0) == pytest.approx(100.0 + step_s)
    # Woken 0.3 steps late: the next deadline does not move.
    assert charge(100.0 + 1.3 * step_s) == pytest.approx(100.0 + 2 * step_s)
    # Ten steps late: due at once, and from then on in step again.
    assert charge(100.0 + 12 * step_s) == pytest.approx(100.0 + 12 * step_s)
    assert charge(100.0 + 12 * step_s) == pytest.approx(100.0 + 13 * step_s)
    # After idling nothing is owed.
    pacer.restart()
    assert charge(200.0) == pytest.approx(200.0 + step_s)


async def computed(engine: EmbeddedEngine) -> None:
    """Once to enter next(), once for its step."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.stats().num_steps == 1


def test_abort_takes_the_token_that_is_held_back(model):
    """The step is computed, its deltas wait for the deadline; nobody else will deliver them."""
    engine = make(model, time_scale=5.0)

    async def scenario():
        await engine.load(publish(model.reference))
        engine.submit([Request(1, PROMPT, 20), Request(2, PROMPT, 20, seed=1)])
        waiting = asyncio.create_task(engine.next())
        await computed(engine)
        aborted = await engine.abort([1])
        return aborted, await waiting

    (aborted,), delivered = run(scenario())
    assert (aborted.request, aborted.stop_reason, len(aborted.token_ids)) == (1, "abort", 1)
    assert [(delta.request, len(delta.token_ids)) for delta in delivered] == [(2, 1)]


def test_a_load_waits_for_the_last_delta(model):
    """A finished request whose last delta is held back is still the engine's."""
    engine = make(model, time_scale=2.0)

    async def scenario():
        await engine.load(publish(model.reference))
        engine.submit([Request(1, PROMPT, 1)])
        waiting = asyncio.create_task(engine.next())
        await computed(engine)
        assert await engine.abort([1]) == []
        with pytest.raises(RuntimeError, match="last deltas"):
            await engine.load(publish(model.reference, version=2))
        (last,) = await waiting
        assert last.stop_reason == "length"
        await engine.load(publish(model.reference, version=2))

    run(scenario())


def test_a_paced_engine_states_its_profile(model):
    engine = make(model, time_scale=0.2)
    assert (
        engine.decode_cost()
        == scale_profile(
            PROFILES["h800-qwen2.5-32b-tp4"], time_scale=0.2, batch_scale=8.0, kv_capacity_tokens=4096
        ).decode
    )
