"""Settings of learning and of its checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.losses import GrpoLoss, LossConfig
from laminar.config.section import Count, Seconds, Section


class OverlongConfig(Section):
    """What becomes of responses that are too long (DAPO)."""

    buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """The reward sinks over so many tokens before data.response_tokens_max; 0: it does not."""
    penalty_max: Annotated[float, Field(gt=0)] = 1.0
    """How far the reward has sunk at data.response_tokens_max."""
    filtered: bool = False
    """Whether truncated trajectories are left out of the loss; they stay in their prompt group's mean reward."""


class TrainerConfig(Section):
    num_ranks: Count = 1
    """Processes that train together; weights, gradients and optimizer are sharded over them (FSDP2)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute; with cuda each has an accelerator of its own."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of forward and backward passes; weights and optimizer stay float32. None: bfloat16 on cuda, float32 on cpu."""
    activation_checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass instead of kept: less memory, more time."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW's, at its highest."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What it does after the warm-up; linear and cosine fall until the end of trainer.num_steps, which they need."""
    learning_rate_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that a falling schedule ends at."""
    num_warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates over which the learning rate rises from zero."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's, decoupled."""
    grad_norm_max: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    loss: LossConfig = GrpoLoss()
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight in the loss of the KL to the initial weights (k3 estimate), which are then held beside those being
    trained; 0: none."""
    overlong: OverlongConfig = OverlongConfig()
    micro_batch_tokens_max: Count = 16384
    """Tokens of prompts and responses in one forward-backward; there is no padding. A longer trajectory has its own."""
    float32_head: bool = False
    """Whether logits are computed in float32 where the model is in bfloat16 (ScaleRL); log-probs always are."""
    num_steps: Count | None = None
    """Stop after this many steps; none: at the end of the data."""
    work_deadline_s: Seconds = 600.0
    """A trainer that needs longer for one mini-batch, hand-over or checkpoint is taken for lost."""


class CheckpointConfig(Section):
    interval_steps: Count = 20
    """Save every so many steps, and at the last; experience is kept until a checkpoint covers it."""
    num_kept: Count = 2
    """Complete checkpoints kept; older ones are deleted."""
