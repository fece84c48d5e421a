"""Settings of learning and of its checkpoints."""

from typing import Annotated

from pydantic import Field

from laminar.config.section import Count, Fraction, Seconds, Section


class TrainerConfig(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW's, constant after the warm-up."""
    num_warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates over which the learning rate rises from zero."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's, decoupled."""
    grad_norm_max: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    clip_ratio_low: Fraction = 0.2
    """The policy ratio is clipped below 1 minus this."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.28
    """The policy ratio is clipped above 1 plus this."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: above this ratio a token of negative advantage loses its gradient too; none: no such limit."""
    micro_batch_tokens_max: Count = 16384
    """Padded tokens in one forward-backward."""
    num_steps: Count | None = None
    """Stop after this many steps; none: at the end of the data."""
    work_deadline_s: Seconds = 600.0
    """A trainer that needs longer for one mini-batch, hand-over or checkpoint is taken for lost."""


class CheckpointConfig(Section):
    interval_steps: Count = 20
    """Save every so many steps, and at the last; experience is kept until a checkpoint covers it."""
    num_kept: Count = 2
    """Complete checkpoints kept; older ones are deleted."""
