"""Our GRPO loss and gradient beside TRL's own code, and beside verl's published formula, on the same tensors."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from laminar.config import GrpoLoss
from laminar.train.losses.grpo import Grpo
from laminar.train.losses.loss import TokenBatch
from laminar.train.mini_batch import prepare
from laminar.train.trainer import Trainer

WARM = Path(__file__).parents[2] / "examples" / "iterate" / "warm"


@pytest.fixture
def stale(make_config, sample):
    """A trainer some updates from what sampled its batch, so that all three clips act; one stretch of tool output."""
    trainer = Trainer(make_config(WARM, temperature=0.8, learning_rate=2e-2, weight_decay=0.0))
    behaviour = copy.deepcopy(trainer.model)
    for step in (1, 2, 3):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step, temperature=0.8))
    experiences = sample(behaviour, 4, seed=9, temperature=0.8)
    longest = max(experiences, key=lambda e: len(e.response.token_ids))
    longest.response.loss_mask[3:6] = [0, 0, 0]
    return trainer, experiences


@pytest.mark.parametrize("clip_ratio_c", [3.0, None])
@pytest.mark.parametrize("num_rows", [4, 16])
def test_loss_and_gradient_are_trls(stale, tmp_path, num_rows, clip_ratio_c):
    pytest.importorskip("trl", reason="TRL comes with the dev extra")
    from laminar.bench.trl_update import TrlUpdate, trl_batch

    trainer, experiences = stale
    loss = trainer.config.trainer.loss.model_copy(update={"clip_ratio_c": clip_ratio_c})
    config = trainer.config.model_copy(update={"trainer": trainer.config.trainer.model_copy(update={"loss": loss})})
    ours = Trainer(config)
    ours.model.load_state_dict(trainer.model.state_dict())
    theirs = TrlUpdate(config, AutoTokenizer.from_pretrained(WARM), tmp_path)
    theirs.model.load_state_dict(trainer.model.state_dict())
    # The one difference: left as transformers loads it, the token that pads gets no gradient where it is a real token.
    theirs.model.get_input_embeddings().padding_idx = None

    mini_batch = prepare(experiences, config, 0)
    expected = theirs.accumulate_gradient(trl_batch(experiences, mini_batch.advantages, filler=0), num_rows)
    tokens = ours.accumulate_gradient(mini_batch)

    assert mini_batch.weighted_sum(tokens.loss, tokens.rows).item() == pytest.approx(expected, abs=1e-6)
    assert tokens.clipped.any()
    if clip_ratio_c is not None:
        assert tokens.clipped_lower.any()
    for (name, parameter), reference in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        difference = (parameter.grad - reference.grad).norm()
        assert difference <= 1e-5 * reference.grad.norm() + 1e-8, name


def verl_policy_loss(old_log_prob, log_prob, advantages, response_mask, low, high, c):
    """verl's compute_policy_loss_vanilla with loss_agg_mode="token-mean", as published (core_algos.py, v0.5)."""
    negative_approx_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    pg_clipfrac = (torch.gt(pg_losses2, pg_losses1).float() * response_mask).sum() / response_mask.sum()
    pg_losses3 = -advantages * c
    clip_pg_losses2 = torch.min(pg_losses3, clip_pg_losses1)
    lower = torch.gt(clip_pg_losses1, pg_losses3) * (advantages < 0).float()
    pg_clipfrac_lower = (lower * response_mask).sum() / response_mask.sum()
    pg_losses = torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)
    return (pg_losses * response_mask).sum() / response_mask.sum(), pg_clipfrac, pg_clipfrac_lower


def test_loss_gradient_and_clip_fractions_are_verls():
    torch.manual_seed(0)
    num_rows, longest = 16, 40
    lengths = torch.randint(1, longest + 1, (num_rows,))
    mask = (torch.arange(longest) < lengths[:, None]).double()
    behaviour = -torch.rand(num_rows, longest, dtype=torch.float64) * 3
    policy = (behaviour + torch.randn(num_rows, longest, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(num_rows, 1, dtype=torch.float64).expand(num_rows, longest)
    expected, clipfrac, clipfrac_lower = verl_policy_loss(behaviour, policy, advantages, mask, 0.2, 0.28, 3.0)
    expected.backward()
    assert policy.grad is not None

    real = mask.bool()
    ours = policy.detach().clone().requires_grad_()
    result = Grpo(GrpoLoss())(
        TokenBatch(
            ours[real], behaviour[real], None, advantages[real], torch.arange(num_rows).repeat_interleave(lengths)
        )
    )
    loss = result.loss.mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert result.clipped.double().mean().item() == pytest.approx(clipfrac.item(), abs=1e-6)
    assert result.clipped_lower.double().mean().item() == pytest.approx(clipfrac_lower.item(), abs=1e-6)
    assert clipfrac > 0.1 and clipfrac_lower > 0.05
    torch.testing.assert_close(ours.grad, policy.grad, atol=1e-12, rtol=0)
