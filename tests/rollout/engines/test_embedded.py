"""How the embedded engine goes about it: prefill, slots, broken numbers, its single thread."""

import asyncio
import copy
import random
import threading

import pytest
import torch

from laminar.config import EmbeddedEngineConfig
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from laminar.rollout.engines.kv_slots import KvSlots
from laminar.rollout.engines.sequence import Sequence
from laminar.rollout.engines.steps import prefill
from laminar.rollout.engines.transformer import Transformer
from tests.rollout.engines.driving import Response, decode, finish, resumed, run
from tests.rollout.engines.published import publish, reference_logprobs

PROMPT = tuple(range(5, 45))


def make(model, **settings) -> EmbeddedEngine:
    config = EmbeddedEngineConfig.model_validate({"num_slots": 16, "kv_capacity_tokens": 8192} | settings)
    return EmbeddedEngine(config, model.path, stop_token_ids=())


def assert_exact(model, requests: list[Request], responses: list[Response]) -> None:
    for request, response in zip(requests, responses, strict=True):
        assert (len(response.token_ids), response.stop_reason) == (request.num_new_tokens_max, "length")
        expected = reference_logprobs(model.reference, request.token_ids, tuple(response.token_ids))
        assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("prefill_chunk_tokens", [7, 64, 256])
def test_chunks_do_not_change_what_is_decoded(model, prefill_chunk_tokens):
    """Long prompts that share a step with short ones, and pass several slot lengths."""
    engine = make(model, prefill_chunk_tokens=prefill_chunk_tokens)
    rng = random.Random(0)
    requests = [
        Request(index, tuple(rng.randrange(96) for _ in range(num_tokens)), 40, seed=index)
        for index, num_tokens in enumerate([1, 300, 2, 127, 128, 129, 64, 65, 255, 256, 257, 500])
    ]

    async def scenario():
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    assert_exact(model, requests, run(scenario()))


def test_a_prompt_is_taken_in_by_chunks(model):
    """99 tokens before the last, 16 a step: the first token comes with the seventh step."""
    engine = make(model, prefill_chunk_tokens=16)

    async def scenario():
        await engine.load(publish(model.reference))
        engine.submit([Request(1, tuple(range(90)) + tuple(range(10)), 5)])
        return [len(await engine.next()) for _ in range(8)]

    assert run(scenario()) == [0, 0, 0, 0, 0, 0, 1, 1]


def test_a_group_computes_its_prompt_once(model):
    """Members at different points of their responses too: what they share is the prompt."""
    transformer = Transformer(model.path)
    slots = KvSlots(transformer.architecture, num_tokens_max=512)
    group = [Request(id_, PROMPT, 10) for id_ in range(15)]
    group.append(Request(15, (*PROMPT, 1, 2, 3), 10, position=3))
    sequences = [Sequence(request) for request in group]
    for sequence in sequences:
        slots.place(sequence)
    with torch.inference_mode():
        num_computed = prefill(transformer, slots, sequences, chunk_tokens=256)
        assert num_computed == len(PROMPT) - 1
        assert [sequence.num_missing for sequence in sequences] == [1] * 15 + [4]
        assert prefill(transformer, slots, sequences, chunk_tokens=256) == 3
        assert [sequence.num_missing for sequence in sequences] == [1] * 16


@pytest.mark.parametrize("prefill_chunk_tokens", [16, 256])
def test_groups_with_shared_prompts_are_exact(model, prefill_chunk_tokens):
    """Also with fewer slots than members, so that some share with a member that is decoding."""
    engine = make(model, num_slots=6, prefill_chunk_tokens=prefill_chunk_tokens)
    requests = [
        Request(8 * group + member, tuple(range(group, group + 50)), 20 + 5 * member, seed=8 * group + member)
        for group in range(3)
        for member in range(8)
    ]

    async def scenario():
        await engine.load(publish(model.reference))
        return await decode(engine, requests)

    assert_exact(model, requests, run(scenario()))


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_change_nothing(model, seed):
    """Submissions, aborts and resumptions at random, under a tight budget, on two engines: every response comes out
    as it does alone, and blocks, slots and requests are all given back.
    """
    rng = random.Random(seed)
    engines = [
        make(
            model,
            num_slots=rng.randint(2, 6),
            kv_capacity_tokens=rng.choice([320, 512]),
            block_tokens=4,
            prefill_chunk_tokens=24,
        )
        for _ in range(2)
    ]
    requests = {
        id_: Request(id_, tuple(range(id_ % 4, id_ % 4 + rng.choice([3, 30, 60]))), rng.randint(1, 100), seed=id_)
        for id_ in range(16)
    }
    spacious = make(model)

    async def scenario():
        for engine in (*engines, spacious):
            await engine.load(publish(model.reference))
        alone = {id_: (await decode(spacious, [request]))[0] for id_, request in requests.items()}
        taken: dict[int, Response] = {id_: Response() for id_ in requests}
        queue, homes = list(requests), {}
        rng.shuffle(queue)
        while any(response.stop_reason != "length" for response in taken.values()):
            for engine in engines:
                batch = [queue.pop() for _ in range(min(len(queue), rng.randint(0, 4)))]
                for id_ in batch:
                    homes[id_], taken[id_].stop_reason = engine, None
                engine.submit([resumed(requests[id_], taken[id_]) for id_ in batch])
                if any(home is engine for home in homes.values()):
                    for delta in await engine.next():
                        taken[delta.request].take(delta)
                if rng.random() < 0.2:
                    for delta in await engine.abort(
                        [id_ for id_, home in homes.items() if home is engine and rng.random() < 0.5]
                    ):
                        taken[delta.request].take(delta)
                for id_ in [id_ for id_, home in homes.items() if home is engine and taken[id_].stop_reason]:
                    del homes[id_]
                    if taken[id_].stop_reason == "abort":
                        queue.append(id_)
        return alone, taken

    alone, taken = run(scenario())
    assert {id_: r.token_ids for id_, r in taken.items()} == {id_: r.token_ids for id_, r in alone.items()}
    for engine in engines:
        stats = engine.stats()
        assert (stats.kv_utilization, stats.num_running, stats.num_waiting) == (0.0, 0, 0)


def test_kv_utilization_counts_whole_blocks(model):
    engine = make(model, kv_capacity_tokens=160, block_tokens=16)

    async def scenario():
        await engine.load(publish(model.reference))
        engine.submit([Request(1, tuple(range(15)), 20)])
        seen = []
        for _ in range(3):
            await engine.next()
            seen.append(engine.stats().kv_utilization)
        return seen

    # 15, 16, 17 tokens fed.
    assert run(scenario()) == [0.1, 0.1, 0.2]


def test_a_preempted_request_goes_to_the_front_and_keeps_its_tokens(model):
    engine = make(model, num_slots=2, kv_capacity_tokens=64, block_tokens=16)
    requests = [Request(id_, tuple(range(20)), 40, seed=id_) for id_ in range(3)]

    async def scenario():
        await engine.load(publish(model.reference))
        responses = {request.id: Response() for request in requests}
        engine.submit(requests)
        order = []
        while any(response.stop_reason is None for response in responses.values()):
            for delta in await engine.next():
                responses[delta.request].take(delta)
                if delta.stop_reason:
                    order.append(delta.request)
        return order, list(responses.values())

    order, responses = run(scenario())
    assert engine.stats().num_preemptions > 0
    assert order == [0, 1, 2]
    assert_exact(model, requests, responses)


def test_a_broken_number_ends_its_own_request_only(models):
    """Token 90's embedding is NaN, which the probe does not meet.

    Its slot is used again by a shorter sequence, beside longer ones: what the mask hides there must not be NaN.
    """
    model = models["qwen2_untied"]
    broken = copy.deepcopy(model.reference)
    with torch.no_grad():
        broken.model.embed_tokens.weight[90] = torch.nan
    engine = make(model)
    cursed = Request(9, (*range(50), 90, *range(9)), 5)
    healthy = [Request(id_, tuple(range(id_, id_ + num)), 3, seed=id_) for id_, num in enumerate([80, 70, 60, 5, 6])]

    async def scenario():
        await engine.load(publish(broken, version=4))
        mixed = await decode(engine, [cursed, *healthy])
        return mixed, await decode(engine, healthy)

    mixed, again = run(scenario())
    assert (mixed[0].stop_reason, mixed[0].token_ids) == ("error", [])
    assert "version 4" in mixed[0].cause
    assert_exact(model, healthy, mixed[1:])
    assert_exact(model, healthy, again)


def test_it_starts_no_thread(model):
    """One core a replica; the process sets torch's own number."""
    engine = make(model)
    threads = threading.active_count()

    async def scenario():
        await engine.load(publish(model.reference))
        await decode(engine, [Request(1, PROMPT, 20)])
        engine.decode_cost()

    run(scenario())
    assert threading.active_count() == threads
    assert torch.get_num_threads() == 1


def test_others_run_between_steps(model):
    """The engine computes inside the event loop, so it must let others in."""
    engine = make(model)

    async def scenario():
        await engine.load(publish(model.reference))
        num_turns = 0

        async def count():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await decode(engine, [Request(1, PROMPT, 50)])
        counting.cancel()
        return num_turns

    assert run(scenario()) >= 50


def test_closing_ends_a_wait_for_work(model):
    engine = make(model)

    async def scenario():
        await engine.load(publish(model.reference))
        responses = {1: Response()}
        engine.submit([Request(1, PROMPT, 3)])
        await finish(engine, responses)
        waiting = asyncio.create_task(engine.next())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting

    run(scenario())


def test_measured_decode_cost_is_plausible_and_kept(model):
    """Before any load, since a replica states it when it starts."""
    engine = make(model)
    cost = engine.decode_cost()
    assert 1e-5 < cost.floor_s + cost.per_running_s < 1.0
    assert min(cost.floor_s, cost.per_kv_token_s, cost.per_running_s) >= 0
    assert engine.decode_cost() is cost
