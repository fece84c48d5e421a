"""Measures a mini-batch: loss, rewards and lengths of all of it, and how far the policy is from the one that sampled.

Names are verl's where verl has the metric. A trajectory with zero advantage is not forwarded (its gradient is zero)
unless a KL to the reference asks for it, so `actor/pg_loss` and `actor/pg_clipfrac*` are exact over all trained tokens,
while `actor/ppo_kl`, `actor/entropy`, `training/rollout_probs_diff_*` and `rollout_corr/*` are over the forwarded ones,
whose share is `actor/forwarded_token_ratio`; they are absent where nothing was forwarded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laminar.train.advantages import equal_reward_ratio
from laminar.train.mini_batch import MiniBatch

STALENESS_BUCKETS = ("0", "1", "2", "3", "4_or_more")


class ForwardedTokens(NamedTuple):
    """What the forward passes of a mini-batch saw, without gradients; all [num_forwarded_tokens]."""

    policy_logprobs: Tensor
    behaviour_logprobs: Tensor
    entropies: Tensor
    loss: Tensor
    """Of the policy, before it is weighed."""
    clipped: Tensor
    clipped_lower: Tensor
    truncated: Tensor
    reference_kl: Tensor
    """k3 estimate, nats; zeros without a reference."""
    rows: Tensor
    """Index of the token's trajectory in the mini-batch."""

    def where(self, chosen: Tensor) -> "ForwardedTokens":
        """Those of the tokens: chosen is [num_forwarded_tokens], bool."""
        return ForwardedTokens(*(values[chosen] for values in self))


def join(parts: Sequence[ForwardedTokens]) -> ForwardedTokens:
    """Lay the micro-batches' tokens end to end."""
    return ForwardedTokens(*map(torch.cat, zip(*parts, strict=True)))


def nothing_forwarded(device: torch.device) -> ForwardedTokens:
    """Of a mini-batch that has nothing to learn from."""
    numbers, flags = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
    return ForwardedTokens(
        policy_logprobs=numbers,
        behaviour_logprobs=numbers,
        entropies=numbers,
        loss=numbers,
        clipped=flags,
        clipped_lower=flags,
        truncated=flags,
        reference_kl=numbers,
        rows=torch.zeros(0, dtype=torch.long, device=device),
    )


def batch_metrics(batch: MiniBatch, prompt_tokens_max: int) -> dict[str, float]:
    """Rewards, advantages and lengths. An advantage weighs as many as its trained tokens."""
    experiences = batch.experiences
    response_lengths = torch.tensor([float(len(experience.response.token_ids)) for experience in experiences])
    prompt_lengths = torch.tensor([float(len(experience.prompt_token_ids)) for experience in experiences])
    truncated = torch.tensor([float(experience.truncated) for experience in experiences])
    metrics = {
        **spread("critic/score", torch.tensor([experience.score for experience in experiences])),
        **spread("critic/rewards", batch.rewards),
        "critic/advantages/mean": _mean_advantage(batch, torch.ones_like(batch.staleness, dtype=torch.bool)),
        "critic/advantages/max": batch.advantages.max().item(),
        "critic/advantages/min": batch.advantages.min().item(),
        **spread("response_length", response_lengths),
        "response_length/clip_ratio": truncated.mean().item(),
        **spread("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": (prompt_lengths >= prompt_tokens_max).float().mean().item(),
        "training/off_policy/trajectory_spans/max": float(max(len(set(e.response.versions)) for e in experiences)),
        "frac_reward_zero_std": equal_reward_ratio(batch.rewards, batch.groups),
    }
    for name, members in _by_staleness(batch):
        metrics[f"critic/advantages/mean/{name}"] = _mean_advantage(batch, members)
    return metrics


def policy_metrics(tokens: ForwardedTokens, batch: MiniBatch) -> dict[str, float]:
    """How far the weights being trained are from those that sampled, overall and by staleness.

    Needs one token at least; a bucket without tokens has no metric.
    """
    ratio = (tokens.policy_logprobs - tokens.behaviour_logprobs).exp()
    probs, behaviour_probs = tokens.policy_logprobs.exp(), tokens.behaviour_logprobs.exp()
    difference = (probs - behaviour_probs).abs()
    num_trained = int(batch.num_trained.sum())
    metrics = {
        **_distance(tokens, num_trained),
        "actor/pg_clipfrac_lower": tokens.clipped_lower.sum().item() / num_trained,
        "actor/ppo_kl": (tokens.behaviour_logprobs - tokens.policy_logprobs).mean().item(),
        "actor/forwarded_token_ratio": len(ratio) / num_trained,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": _correlation(probs, behaviour_probs),
        "rollout_corr/rollout_is_max": ratio.max().item(),
        "rollout_corr/rollout_is_min": ratio.min().item(),
        "rollout_corr/rollout_is_ratio_fraction_high": tokens.truncated.sum().item() / num_trained,
    }
    for name, members in _by_staleness(batch):
        forwarded = members[tokens.rows]
        if forwarded.any():
            here = _distance(tokens.where(forwarded), int(batch.num_trained[members].sum()))
            metrics |= {f"{metric}/{name}": value for metric, value in here.items()}
    return metrics


def mismatch_metrics(tokens: ForwardedTokens, batch: MiniBatch) -> dict[str, float]:
    """Engine against trainer: to be asked before the step's first update, when tokens of staleness 0 were sampled from
    the very weights that are about to be trained. What differs is how the two compute.
    """
    same = tokens.where(batch.staleness[tokens.rows] == 0)
    if not len(same.rows):
        return {}
    difference = (same.policy_logprobs - same.behaviour_logprobs).abs()
    return {
        "training/engine_mismatch/logprob_diff_mean": difference.mean().item(),
        "training/engine_mismatch/logprob_diff_max": difference.max().item(),
        "training/engine_mismatch/k3_kl": k3(same.behaviour_logprobs, same.policy_logprobs).mean().item(),
    }


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Schulman's estimate of KL(p || q) from tokens that p sampled, given log p and log q: unbiased, never negative."""
    log_ratio = other_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


def _distance(tokens: ForwardedTokens, num_trained: int) -> dict[str, float]:
    """What is worth knowing overall and for each staleness alike; num_trained includes tokens not forwarded."""
    ratio = (tokens.policy_logprobs - tokens.behaviour_logprobs).exp()
    return {
        "actor/pg_clipfrac": tokens.clipped.sum().item() / num_trained,
        "actor/entropy": tokens.entropies.mean().item(),
        "rollout_corr/k3_kl": k3(tokens.behaviour_logprobs, tokens.policy_logprobs).mean().item(),
        "rollout_corr/rollout_is_mean": ratio.mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": (ratio.mean().square() / ratio.square().mean()).item(),
    }


def _by_staleness(batch: MiniBatch) -> list[tuple[str, Tensor]]:
    """Each bucket that has trajectories, by name, and which are in it: [num_trajectories], bool."""
    buckets = batch.staleness.clamp(0, len(STALENESS_BUCKETS) - 1)
    return [(f"staleness_{STALENESS_BUCKETS[bucket]}", buckets == bucket) for bucket in buckets.unique().tolist()]


def _mean_advantage(batch: MiniBatch, members: Tensor) -> float:
    num_trained = batch.num_trained[members].float()
    return (batch.advantages[members] @ num_trained / num_trained.sum().clamp_min(1)).item()


def _correlation(some: Tensor, others: Tensor) -> float:
    """Pearson's; 1 where either does not vary, which is no disagreement."""
    if len(some) < 2 or some.std() == 0 or others.std() == 0:
        return 1.0
    return torch.corrcoef(torch.stack([some, others]))[0, 1].item()


def spread(name: str, values: Tensor) -> dict[str, float]:
    """values: one or more, floating point."""
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
