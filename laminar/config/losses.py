"""Settings of the policy losses: each has its kind, and only the fields of that kind, with its paper's defaults."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Fraction, Section

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "budget_mean"]
"""How the token losses of a mini-batch become one number: laminar/train/aggregation.py."""
ClipRatio = Annotated[float, Field(gt=0)]
DualClip = Annotated[float, Field(gt=1)]


class GrpoLoss(Section):
    """GRPO with DAPO's clip-higher; the ratio's denominator is the behaviour log-prob."""

    kind: Literal["grpo"] = "grpo"
    """Policy loss: GRPO with clip-higher."""
    clip_ratio_low: Fraction = 0.2
    """The policy ratio is clipped below 1 minus this."""
    clip_ratio_high: ClipRatio = 0.28
    """The policy ratio is clipped above 1 plus this."""
    clip_ratio_c: DualClip | None = 3.0
    """Dual clip: above this ratio a token of negative advantage loses its gradient too; none: no such limit."""
    aggregation: Aggregation = "token_mean"
    """Mean over all trained tokens, over trajectories, over prompt groups, or over the length budget."""
    divide_by_std: bool = True
    """Whether an advantage is divided by its prompt group's standard deviation."""


class DecoupledPpoLoss(Section):
    """AReaL's decoupled PPO: clipped around the step's first weights, weighted by how far those are from the
    behaviour."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Policy loss: PPO clipped around the proximal policy, times proximal over behaviour (AReaL)."""
    clip_ratio_low: Fraction = 0.2
    """The ratio of policy to proximal policy is clipped below 1 minus this."""
    clip_ratio_high: ClipRatio = 0.2
    """The ratio of policy to proximal policy is clipped above 1 plus this."""
    clip_ratio_c: DualClip | None = None
    """Dual clip of that ratio; none: no such limit."""
    behaviour_weight_max: ClipRatio | None = 5.0
    """Tokens whose ratio of proximal policy to behaviour is above this are left out of the loss; none: none are."""
    aggregation: Aggregation = "token_mean"
    """Mean over all trained tokens, over trajectories, over prompt groups, or over the length budget."""
    divide_by_std: bool = True
    """Whether an advantage is divided by its prompt group's standard deviation."""


class TisLoss(Section):
    """Truncated importance sampling: as decoupled PPO, its weight cut at a maximum instead of left out."""

    kind: Literal["tis"] = "tis"
    """Policy loss: PPO clipped around the proximal policy, times min(proximal over behaviour, a maximum)."""
    level: Literal["token", "sequence"] = "token"
    """Whether each token has a weight, or each trajectory one: the product of its tokens'."""
    weight_max: ClipRatio = 2.0
    """Larger weights count as this; 1.5 to 5 is usual for tokens, 2 to 10 for sequences."""
    clip_ratio_low: Fraction = 0.2
    """The ratio of policy to proximal policy is clipped below 1 minus this."""
    clip_ratio_high: ClipRatio = 0.28
    """The ratio of policy to proximal policy is clipped above 1 plus this."""
    clip_ratio_c: DualClip | None = 3.0
    """Dual clip of that ratio; none: no such limit."""
    aggregation: Aggregation = "token_mean"
    """Mean over all trained tokens, over trajectories, over prompt groups, or over the length budget."""
    divide_by_std: bool = True
    """Whether an advantage is divided by its prompt group's standard deviation."""


class CispoLoss(Section):
    """CISPO: the ratio only weighs the log-prob's gradient, cut at a maximum, so no token loses its gradient."""

    kind: Literal["cispo"] = "cispo"
    """Policy loss: log-prob times advantage times min(policy over behaviour, a maximum) (MiniMax-M1, ScaleRL)."""
    ratio_max: ClipRatio = 5.0
    """Larger policy ratios count as this."""
    aggregation: Aggregation = "token_mean"
    """Mean over all trained tokens, over trajectories, over prompt groups, or over the length budget."""
    divide_by_std: bool = True
    """Whether an advantage is divided by its prompt group's standard deviation."""


class GspoLoss(Section):
    """GSPO: one ratio a trajectory, the geometric mean of its tokens', clipped tightly."""

    kind: Literal["gspo"] = "gspo"
    """Policy loss: clipped surrogate of a ratio a trajectory, the geometric mean of its tokens' (Qwen)."""
    clip_ratio_low: Fraction = 3e-4
    """The trajectory's ratio is clipped below 1 minus this."""
    clip_ratio_high: ClipRatio = 4e-4
    """The trajectory's ratio is clipped above 1 plus this."""
    aggregation: Aggregation = "sequence_mean"
    """Mean over all trained tokens, over trajectories, over prompt groups, or over the length budget."""
    divide_by_std: bool = True
    """Whether an advantage is divided by its prompt group's standard deviation."""


class DrGrpoLoss(Section):
    """Dr. GRPO: GRPO without its two biases, the division by the length and that by the standard deviation."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Policy loss: GRPO with neither a division by lengths nor one by standard deviations."""
    clip_ratio_low: Fraction = 0.2
    """The policy ratio is clipped below 1 minus this."""
    clip_ratio_high: ClipRatio = 0.2
    """The policy ratio is clipped above 1 plus this."""
    aggregation: Literal["budget_mean"] = "budget_mean"
    """Always: the sum over a trajectory's tokens, divided by data.response_tokens_max."""
    divide_by_std: Literal[False] = False
    """Never: an advantage is the reward minus its prompt group's mean."""


LossConfig = Annotated[
    GrpoLoss | DecoupledPpoLoss | TisLoss | CispoLoss | GspoLoss | DrGrpoLoss, Field(discriminator="kind")
]
