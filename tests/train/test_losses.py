"""Every loss against a naive loop: one Python float at a time, value and gradient."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from laminar.config import (
    CispoLoss,
    DecoupledPpoLoss,
    DrGrpoLoss,
    GrpoLoss,
    GspoLoss,
    LossConfig,
    TisLoss,
    TrainerConfig,
)
from laminar.train.losses.build import build_loss
from laminar.train.losses.loss import TokenBatch, TokenLoss

LENGTHS = (1, 7, 3, 12, 5)

Tokens = list[tuple[float, float, float, float, int]]
"""policy, behaviour and proximal log-prob, advantage, trajectory; one a token."""


def make_tokens(seed: int, *, spread: float = 0.8) -> Tokens:
    rng = random.Random(seed)
    advantages = [0.0, 1.3, -0.7, -1.9, 0.4]
    tokens: Tokens = []
    for row, length in enumerate(LENGTHS):
        for _ in range(length):
            behaviour = -rng.expovariate(1.0)
            proximal, policy = behaviour + rng.gauss(0, spread), behaviour + rng.gauss(0, spread)
            tokens.append((policy, behaviour, proximal, advantages[row], row))
    # In no order: a loss finds a trajectory's tokens by row.
    rng.shuffle(tokens)
    return tokens


def run(config: LossConfig, tokens: Tokens) -> tuple[TokenLoss, list[float]]:
    """The loss, and the gradient of its sum by policy log-prob."""
    policy, behaviour, proximal, advantages, rows = zip(*tokens, strict=True)
    loss = build_loss(config)
    logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    result = loss(
        TokenBatch(
            policy_logprobs=logprobs,
            behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
            proximal_logprobs=torch.tensor(proximal, dtype=torch.float64) if loss.needs_proximal else None,
            advantages=torch.tensor(advantages, dtype=torch.float64),
            rows=torch.tensor(rows),
        )
    )
    result.loss.sum().backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


def clipped(ratio: float, advantage: float, low: float, high: float, c: float | None) -> tuple[float, float]:
    """PPO's loss with verl's dual clip, and its derivative by the log of the ratio."""
    unclipped, bounded = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss, slope = (unclipped, -advantage * ratio) if unclipped >= bounded else (bounded, 0.0)
    if c is not None and advantage < 0 and -advantage * c < loss:
        return -advantage * c, 0.0
    return loss, slope


def naive_grpo(config: GrpoLoss, tokens: Tokens) -> list[tuple[float, float]]:
    low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    return [clipped(math.exp(policy - behaviour), a, low, high, c) for policy, behaviour, _, a, _ in tokens]


def naive_dr_grpo(config: DrGrpoLoss, tokens: Tokens) -> list[tuple[float, float]]:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return [clipped(math.exp(policy - behaviour), a, low, high, None) for policy, behaviour, _, a, _ in tokens]


def naive_decoupled_ppo(config: DecoupledPpoLoss, tokens: Tokens) -> list[tuple[float, float]]:
    expected = []
    for policy, behaviour, proximal, a, _ in tokens:
        weight = math.exp(proximal - behaviour)
        if config.behaviour_weight_max is not None and weight > config.behaviour_weight_max:
            weight = 0.0
        low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
        loss, slope = clipped(math.exp(policy - proximal), a, low, high, c)
        expected.append((weight * loss, weight * slope))
    return expected


def naive_tis(config: TisLoss, tokens: Tokens) -> list[tuple[float, float]]:
    expected = []
    for policy, behaviour, proximal, a, row in tokens:
        if config.level == "token":
            weight = math.exp(proximal - behaviour)
        else:
            weight = math.prod(math.exp(other[2] - other[1]) for other in tokens if other[4] == row)
        weight = min(weight, config.weight_max)
        low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
        loss, slope = clipped(math.exp(policy - proximal), a, low, high, c)
        expected.append((weight * loss, weight * slope))
    return expected


def naive_cispo(config: CispoLoss, tokens: Tokens) -> list[tuple[float, float]]:
    expected = []
    for policy, behaviour, _, a, _ in tokens:
        weight = min(math.exp(policy - behaviour), config.ratio_max)
        expected.append((-weight * a * policy, -weight * a))
    return expected


def naive_gspo(config: GspoLoss, tokens: Tokens) -> list[tuple[float, float]]:
    """Every token of a trajectory has its loss, whose slope by each of n log-probs is 1 / n of that by their mean."""
    expected = []
    for _, _, _, a, row in tokens:
        members = [(other[0], other[1]) for other in tokens if other[4] == row]
        ratio = math.exp(sum(policy - behaviour for policy, behaviour in members) / len(members))
        # The n equal losses add up to n times the slope by the mean.
        expected.append(clipped(ratio, a, config.clip_ratio_low, config.clip_ratio_high, None))
    return expected


CASES: list[tuple[LossConfig, Callable[..., list[tuple[float, float]]]]] = [
    (GrpoLoss(), naive_grpo),
    (GrpoLoss(clip_ratio_c=1.5), naive_grpo),
    (GrpoLoss(clip_ratio_c=None, clip_ratio_low=0.1, clip_ratio_high=0.5), naive_grpo),
    (DrGrpoLoss(), naive_dr_grpo),
    (DecoupledPpoLoss(behaviour_weight_max=2.0), naive_decoupled_ppo),
    (DecoupledPpoLoss(behaviour_weight_max=None, clip_ratio_c=3.0), naive_decoupled_ppo),
    (TisLoss(), naive_tis),
    (TisLoss(level="sequence", weight_max=5.0, clip_ratio_c=None), naive_tis),
    (CispoLoss(ratio_max=1.5), naive_cispo),
    (GspoLoss(), naive_gspo),
    (GspoLoss(clip_ratio_low=0.2, clip_ratio_high=0.3), naive_gspo),
]


@pytest.mark.parametrize(("config", "naive"), CASES, ids=lambda case: case.kind if not callable(case) else "naive")
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_equals_its_naive_loop_in_value_and_gradient(config, naive, seed):
    tokens = make_tokens(seed)
    result, gradient = run(config, tokens)
    expected = naive(config, tokens)
    assert result.loss.tolist() == pytest.approx([loss for loss, _ in expected], abs=1e-6)
    assert gradient == pytest.approx([slope for _, slope in expected], abs=1e-6)


@pytest.mark.parametrize(("config", "naive"), CASES, ids=lambda case: case.kind if not callable(case) else "naive")
def test_what_a_loss_bounds_is_marked(config, naive):
    tokens = make_tokens(0)
    result, gradient = run(config, tokens)
    for k, (_, _, _, advantage, _) in enumerate(tokens):
        lost = bool(result.clipped[k]) or bool(result.clipped_lower[k])
        left_out = bool(result.truncated[k]) and config.kind == "decoupled_ppo"
        assert (gradient[k] == 0) is (lost or left_out or advantage == 0)
    bounded = result.clipped | result.clipped_lower | result.truncated
    assert bounded.any() and not bounded.all(), "else this shows nothing"


@pytest.mark.parametrize(("config", "naive"), CASES, ids=lambda case: case.kind if not callable(case) else "naive")
def test_on_fresh_data_every_loss_has_the_policy_gradient(config, naive):
    """Where policy, proximal and behaviour are one, nothing is clipped or cut: the gradient is -advantage."""
    tokens = [(policy, policy, policy, advantage, row) for policy, _, _, advantage, row in make_tokens(1)]
    result, gradient = run(config, tokens)
    assert gradient == pytest.approx([-advantage for *_, advantage, _ in tokens], abs=1e-12)
    assert not (result.clipped | result.clipped_lower | result.truncated).any()


def test_a_sequence_weight_too_large_for_a_float_is_truncated_like_any_other():
    tokens = [(-1.0, -60.0, -1.0, 1.0, 0), (-1.0, -60.0, -1.0, 1.0, 0)]
    result, gradient = run(TisLoss(level="sequence", weight_max=2.0), tokens)
    assert result.loss.tolist() == [-2.0, -2.0] and gradient == [-2.0, -2.0]


@pytest.mark.parametrize("kind", ["grpo", "decoupled_ppo", "tis", "cispo", "gspo", "dr_grpo"])
def test_a_loss_is_chosen_by_its_kind_alone(kind):
    config = TrainerConfig.model_validate({"loss": {"kind": kind}})
    assert config.loss.kind == kind
    assert build_loss(config.loss)
