"""Measures a mini-batch: loss, rewards and lengths of all of it, and how far the policy is from the one that sampled.

Names are verl's where verl has the metric. A trajectory with zero advantage is not forwarded (its gradient is zero),
so `actor/pg_loss` and `actor/pg_clipfrac*` are exact over all trained tokens, while `actor/ppo_kl`, `actor/entropy`,
`training/rollout_probs_diff_*` and `rollout_corr/*` are over the forwarded ones, whose share is
`actor/forwarded_token_ratio`; they are absent where nothing was forwarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.data.records import Experience
from laminar.train.packing import num_trained_tokens

STALENESS_BUCKETS = ("0", "1", "2", "3", "4_or_more")


@dataclass(frozen=True, slots=True)
class ForwardedTokens:
    """What the forward passes of a mini-batch saw, without gradients; all [num_forwarded_tokens]."""

    policy_logprobs: Tensor
    behaviour_logprobs: Tensor
    entropies: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    rows: Tensor
    """Index of the token's trajectory in the mini-batch."""


def join(parts: Sequence[ForwardedTokens]) -> ForwardedTokens:
    """Lay the micro-batches' tokens end to end."""
    return ForwardedTokens(
        policy_logprobs=torch.cat([part.policy_logprobs for part in parts]),
        behaviour_logprobs=torch.cat([part.behaviour_logprobs for part in parts]),
        entropies=torch.cat([part.entropies for part in parts]),
        clipped=torch.cat([part.clipped for part in parts]),
        clipped_lower=torch.cat([part.clipped_lower for part in parts]),
        rows=torch.cat([part.rows for part in parts]),
    )


def batch_metrics(experiences: Sequence[Experience], advantages: Tensor, prompt_tokens_max: int) -> dict[str, float]:
    """Rewards, advantages and lengths; advantages are [num_trajectories] and weigh as many as their trained tokens."""
    rewards = torch.tensor([experience.score for experience in experiences])
    response_lengths = torch.tensor([float(len(experience.response.token_ids)) for experience in experiences])
    prompt_lengths = torch.tensor([float(len(experience.prompt_token_ids)) for experience in experiences])
    truncated = torch.tensor([float(experience.truncated) for experience in experiences])
    num_trained = torch.tensor([float(num_trained_tokens(experience)) for experience in experiences])
    return {
        **_spread("critic/rewards", rewards),
        "critic/advantages/mean": (advantages @ num_trained / num_trained.sum().clamp_min(1)).item(),
        "critic/advantages/max": advantages.max().item(),
        "critic/advantages/min": advantages.min().item(),
        **_spread("response_length", response_lengths),
        "response_length/clip_ratio": truncated.mean().item(),
        **_spread("prompt_length", prompt_lengths),
        "training/off_policy/trajectory_spans/max": float(max(len(set(e.response.versions)) for e in experiences)),
        "prompt_length/clip_ratio": (prompt_lengths >= prompt_tokens_max).float().mean().item(),
    }


def policy_metrics(tokens: ForwardedTokens, num_trained_per_row: Tensor, staleness: Tensor) -> dict[str, float]:
    """How far the weights being trained are from those that sampled, overall and by staleness.

    num_trained_per_row, staleness: [num_trajectories], int. Staleness is the trainer's version minus the
    trajectory's; a bucket without tokens has no metric.
    """
    log_ratio = tokens.policy_logprobs - tokens.behaviour_logprobs
    ratio = log_ratio.exp()
    # Schulman's k3: never negative, unbiased for KL(behaviour || policy), as the tokens are the behaviour's.
    k3 = ratio - 1 - log_ratio
    probs_diff = (tokens.policy_logprobs.exp() - tokens.behaviour_logprobs.exp()).abs()
    num_trained = int(num_trained_per_row.sum())
    return {
        "actor/pg_clipfrac": tokens.clipped.sum().item() / num_trained,
        "actor/pg_clipfrac_lower": tokens.clipped_lower.sum().item() / num_trained,
        "actor/ppo_kl": -log_ratio.mean().item(),
        "actor/entropy": tokens.entropies.mean().item(),
        "actor/forwarded_token_ratio": len(ratio) / num_trained,
        "training/rollout_probs_diff_max": probs_diff.max().item(),
        "training/rollout_probs_diff_mean": probs_diff.mean().item(),
        "rollout_corr/k3_kl": k3.mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": (ratio.mean().square() / ratio.square().mean()).item(),
        **{f"rollout_corr/rollout_is_{end}": value for end, value in _ends(ratio).items()},
        **_by_staleness(tokens, k3, num_trained_per_row, staleness),
    }


def _by_staleness(
    tokens: ForwardedTokens, k3: Tensor, num_trained_per_row: Tensor, staleness: Tensor
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    buckets = staleness.clamp(0, len(STALENESS_BUCKETS) - 1)
    token_buckets = buckets[tokens.rows]
    for bucket in buckets.unique().tolist():
        name = f"staleness_{STALENESS_BUCKETS[bucket]}"
        num_trained = int(num_trained_per_row[buckets == bucket].sum())
        forwarded = token_buckets == bucket
        if num_trained:
            metrics[f"actor/pg_clipfrac/{name}"] = tokens.clipped[forwarded].sum().item() / num_trained
        if forwarded.any():
            metrics[f"rollout_corr/k3_kl/{name}"] = k3[forwarded].mean().item()
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}/{end}": value for end, value in _ends(values).items()}


def _ends(values: Tensor) -> dict[str, float]:
    return {"mean": values.mean().item(), "max": values.max().item(), "min": values.min().item()}
