"""The cost model's numbers, its scaling, and the batch bound it gives."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.costs import PROFILES, decode_batch_max, decode_step_s, scale_profile
from laminar.control.messages import DecodeCost

H800 = PROFILES["h800-qwen2.5-32b-tp4"]
COSTS = st.builds(
    DecodeCost, floor_s=st.floats(1e-4, 1e-1), per_kv_token_s=st.floats(0, 1e-6), per_running_s=st.floats(0, 1e-3)
)


def test_profile_reproduces_the_published_step_times():
    """About 60 ms at 270 running and 82 % of the KV, 20 to 27 ms in the tail (Laminar, Table 1 and Figure 16)."""
    assert decode_step_s(H800.decode, num_running=270, num_kv_tokens=650_000) == pytest.approx(0.060, rel=0.1)
    assert 0.0175 < decode_step_s(H800.decode, num_running=4, num_kv_tokens=40_000) < 0.027


@pytest.mark.parametrize(("num_tokens", "published_s"), [(1024, 0.0345), (2048, 0.064), (4096, 0.130), (8192, 0.270)])
def test_profile_reproduces_the_prefill_table(num_tokens, published_s):
    assert num_tokens * H800.prefill_s_per_token == pytest.approx(published_s, rel=0.1)


def test_a_full_replica_here_costs_what_a_full_one_costs_there():
    tiny = scale_profile(H800, time_scale=0.2, batch_scale=8.0, kv_capacity_tokens=4096)
    there = decode_step_s(H800.decode, num_running=256, num_kv_tokens=790_000)
    assert decode_step_s(tiny.decode, num_running=32, num_kv_tokens=4096) == pytest.approx(0.2 * there)
    assert tiny.prefill_s_per_token == pytest.approx(0.2 * 8.0 * H800.prefill_s_per_token)


def test_batch_bound_by_hand():
    """Floor 10, 1 a trajectory: a step at batch 1 costs 11, at 12 (2 x 11 - 10) twice that."""
    assert decode_batch_max(DecodeCost(10.0, 0.0, 1.0), tolerance=2.0, context_tokens=100) == 12
    assert decode_batch_max(DecodeCost(10.0, 0.005, 0.5), tolerance=2.0, context_tokens=100) == 12


def test_batch_bound_of_the_published_replica():
    """Fits the paper's tail: some dozens of trajectories of 4K tokens at 1.7 times the latency of one."""
    assert 20 < decode_batch_max(H800.decode, tolerance=1.7, context_tokens=4096) < 100


@given(cost=COSTS, tolerance=st.floats(1.0, 4.0), context_tokens=st.integers(1, 100_000))
def test_batch_bound_is_the_largest_within_the_tolerance(cost, tolerance, context_tokens):
    bound = decode_batch_max(cost, tolerance=tolerance, context_tokens=context_tokens)

    def step_s(num_running):
        return decode_step_s(cost, num_running=num_running, num_kv_tokens=num_running * context_tokens)

    assert bound >= 1
    if bound < sys.maxsize:
        assert step_s(bound) <= tolerance * step_s(1) * (1 + 1e-6)
        assert step_s(bound + 1) > tolerance * step_s(1) * (1 - 1e-6)


def test_a_trajectory_that_costs_nothing_is_not_bounded():
    assert decode_batch_max(DecodeCost(0.01, 0.0, 0.0), tolerance=1.7, context_tokens=100) == sys.maxsize


def test_a_tolerance_below_1_is_refused():
    with pytest.raises(ValueError, match=r"tolerance=0\.9"):
        decode_batch_max(H800.decode, tolerance=0.9, context_tokens=100)
