import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.config import GrpoLoss
from laminar.train.losses.grpo import Grpo
from laminar.train.losses.loss import TokenBatch, TokenLoss

LOGPROB = st.floats(-3, 0)


def clip_higher(
    policy: list[float], behaviour: list[float], advantages: list[float], clip_ratio_c: float | None = 3.0
) -> tuple[torch.Tensor, TokenLoss]:
    logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(
        policy_logprobs=logprobs,
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        proximal_logprobs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        rows=torch.zeros(len(policy), dtype=torch.long),
    )
    result = Grpo(GrpoLoss(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=clip_ratio_c))(tokens)
    result.loss.sum().backward()
    return logprobs, result


@given(LOGPROB, LOGPROB, st.floats(-2, 2), st.sampled_from([None, 1.5, 3.0]))
def test_loss_of_a_token_is_the_formula(policy, behaviour, advantage, clip_ratio_c):
    _, result = clip_higher([policy], [behaviour], [advantage], clip_ratio_c)
    ratio = math.exp(policy - behaviour)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    if clip_ratio_c is not None and advantage < 0:
        expected = min(expected, clip_ratio_c * -advantage)
    assert result.loss.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),
        (1.29, 1.0, True),
        (0.5, 1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (2.0, -1.0, False),
    ],
)
def test_a_token_loses_its_gradient_only_where_it_has_moved_far_enough_already(ratio, advantage, clipped):
    logprobs, result = clip_higher([math.log(ratio)], [0.0], [advantage])
    assert result.clipped.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_ratio_c", "clipped_lower"),
    [
        (2.9, -1.0, 3.0, False),
        (3.1, -1.0, 3.0, True),
        (50.0, -1.0, 3.0, True),
        (50.0, -1.0, None, False),
        (0.1, -1.0, 3.0, False),
        (50.0, 0.0, 3.0, False),
        (50.0, 1.0, 3.0, False),
    ],
)
def test_the_dual_clip_bounds_what_a_bad_token_that_became_likely_costs(ratio, advantage, clip_ratio_c, clipped_lower):
    logprobs, result = clip_higher([math.log(ratio)], [0.0], [advantage], clip_ratio_c)
    assert result.clipped_lower.item() is clipped_lower
    assert logprobs.grad is not None
    if clipped_lower:
        assert clip_ratio_c is not None
        assert result.loss.item() == pytest.approx(clip_ratio_c * -advantage)
        assert logprobs.grad.item() == 0
    elif advantage < 0 and not result.clipped.item():
        assert logprobs.grad.item() == pytest.approx(-ratio * advantage)
