import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.control.messages import TrajectoryId
from laminar.sim.engine import Sequence, SimulatedEngine
from laminar.sim.step_cost import StepCost
from laminar.sim.workload import Call, Response
from tests.sim.stepwise_engine import Held, StepwiseEngine

COST = StepCost([0.010 + 0.0002 * n + 0.000001 * n * n for n in range(65)], [2e-6] * 65, [10.0, 100.0], [0.004, 0.020])
BLOCK_TOKENS = 4


def engine(num_blocks: int = 60, num_running_max: int = 8, share: float = 0.95) -> SimulatedEngine:
    return SimulatedEngine(
        COST,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        num_running_max=num_running_max,
        kv_utilization_max=share,
    )


def sequence(id: int, length: int, *, prompt_tokens: int = 5, num_tokens: int = 0, calls: tuple[Call, ...] = ()):
    return Sequence(TrajectoryId(id), 0, prompt_tokens, Response(length, False, calls), num_tokens)


def drain(simulated: SimulatedEngine) -> list[tuple[int, float]]:
    """To the end, moment by moment; when each one finished."""
    finished = [(s.trajectory, simulated.now_s) for s in simulated.take_finished()]
    while not simulated.empty:
        simulated.advance(simulated.next_moment_s())
        assert 0 <= simulated.blocks_used <= simulated._num_blocks
        finished += [(s.trajectory, simulated.now_s) for s in simulated.take_finished()]
    return finished


responses = st.builds(
    lambda n, calls: Response(n, False, tuple(Call(at, s) for at, s in sorted(dict(calls).items()) if 0 < at < n)),
    st.integers(1, 120),
    st.lists(st.tuples(st.integers(1, 119), st.floats(0.01, 3.0)), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), responses), min_size=1, max_size=24),
    st.integers(45, 200),
    st.integers(1, 12),
    st.sampled_from([0.9, 1.0]),
)
def test_jumps_agree_with_single_steps(batch, num_blocks, num_running_max, share):
    """Who finishes when, how often somebody is preempted, and how many tokens were decoded."""
    simulated = engine(num_blocks, num_running_max, share)
    stepwise = StepwiseEngine(COST, num_blocks, BLOCK_TOKENS, num_running_max, share)
    simulated.submit([Sequence(TrajectoryId(i), 0, prompt, r) for i, (prompt, r) in enumerate(batch)], 0.0)
    stepwise.submit([Held(i, prompt, r) for i, (prompt, r) in enumerate(batch)])
    while stepwise.running or stepwise.waiting or stepwise.tools:
        stepwise.step()
    finished = drain(simulated)
    assert sorted(finished) == [(id, pytest.approx(at_s, rel=1e-9)) for id, at_s in sorted(stepwise.finished)]
    assert simulated.usage.num_preemptions == stepwise.num_preemptions
    assert simulated.usage.num_tokens == sum(r.num_tokens for _, r in batch)
    assert stepwise.blocks_seen_max <= num_blocks
    assert simulated.blocks_used == 0


def test_looking_more_often_changes_nothing():
    batch = [sequence(i, 10 + 7 * i % 90) for i in range(20)]
    seldom, often = engine(), engine()
    seldom.submit(batch, 0.0)
    often.submit([sequence(i, 10 + 7 * i % 90) for i in range(20)], 0.0)
    seen: list[tuple[int, float]] = []
    rng = random.Random(3)
    at_s = 0.0
    while not often.empty:
        at_s += rng.uniform(0.0, 0.2)
        often.advance(at_s)
        seen += [(s.trajectory, at_s) for s in often.take_finished()]
    expected = dict(drain(seldom))
    assert dict(seen).keys() == expected.keys()
    assert all(expected[id] <= at_s + 1e-9 < expected[id] + 0.2 + 1e-9 for id, at_s in seen)
    assert often.usage.num_tokens == seldom.usage.num_tokens
    assert often.usage.busy_s == pytest.approx(seldom.usage.busy_s)
    assert often.usage.kv_token_s == pytest.approx(seldom.usage.kv_token_s, rel=1e-2)


def test_what_is_asked_during_a_step_takes_effect_when_it_ends():
    simulated = engine()
    simulated.submit([sequence(0, 100)], 0.0)
    step_s = COST.steps_s(1, 1, 5)
    prefill_s = COST.prefill_s(5)
    simulated.advance(prefill_s + step_s)
    simulated.submit([sequence(1, 100)], prefill_s + 1.5 * step_s)
    assert simulated.now_s == pytest.approx(prefill_s + step_s + COST.steps_s(1, 1, 6))
    assert [simulated.tokens_of(s) for s in simulated.running.values()] == [2, 0]


def test_released_trajectories_keep_their_tokens_and_give_their_blocks_back():
    simulated = engine(num_running_max=2)
    simulated.submit([sequence(i, 50) for i in range(3)], 0.0)
    simulated.advance(0.3)
    num_tokens = simulated.tokens_of(simulated.running[TrajectoryId(0)])
    assert num_tokens > 0
    released = simulated.release([TrajectoryId(0), TrajectoryId(2)], 0.3)
    assert [(s.trajectory, s.num_tokens) for s in released] == [(0, num_tokens + 1), (2, 0)]
    assert list(simulated.running) == [1]
    assert simulated.blocks_used == -(-(5 + num_tokens + 1) // BLOCK_TOKENS)
    assert simulated.release([TrajectoryId(1)], 0.3)[0].trajectory == 1
    assert simulated.empty
    assert simulated.blocks_used == 0


def test_the_last_admitted_is_preempted_and_admitted_again_first():
    simulated = engine(num_blocks=20, share=1.0)
    simulated.submit([sequence(0, 60), sequence(1, 60)], 0.0)
    while not simulated.usage.num_preemptions:
        simulated.advance(simulated.next_moment_s())
    # Two share 20 blocks of 4 tokens; 80 tokens are reached before either has its 65.
    assert list(simulated.running) == [0]
    assert [s.trajectory for s in simulated.waiting] == [1]
    order = [id for id, _ in drain(simulated)]
    assert order == [0, 1]


def test_a_trajectory_goes_on_from_the_tokens_that_it_has():
    simulated = engine()
    simulated.submit([sequence(0, 50, num_tokens=48)], 0.0)
    (finished,) = drain(simulated)
    assert finished[1] == pytest.approx(COST.prefill_s(53) + COST.steps_s(2, 1, 53))


def test_a_tool_call_leaves_the_batch_to_others():
    simulated = engine(num_running_max=1)
    simulated.submit([sequence(0, 20, calls=(Call(10, 100.0),)), sequence(1, 30)], 0.0)
    (first, second) = drain(simulated)
    assert (first[0], second[0]) == (1, 0)
    assert second[1] > 100.0
