import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.train.losses.grpo import ClipHigher
from laminar.train.losses.loss import TokenBatch, TokenLoss

LOGPROB = st.floats(-3, 0)


def clip_higher(policy: list[float], behaviour: list[float], advantages: list[float]) -> tuple[torch.Tensor, TokenLoss]:
    logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(
        policy_logprobs=logprobs,
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        rows=torch.zeros(len(policy), dtype=torch.long),
    )
    result = ClipHigher(clip_ratio_low=0.2, clip_ratio_high=0.28)(tokens)
    result.loss.sum().backward()
    return logprobs, result


@given(LOGPROB, LOGPROB, st.floats(-2, 2))
def test_loss_of_a_token_is_the_formula(policy, behaviour, advantage):
    _, result = clip_higher([policy], [behaviour], [advantage])
    ratio = math.exp(policy - behaviour)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
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
