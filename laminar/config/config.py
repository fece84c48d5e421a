"""Puts the groups of settings together, and refuses those that do not fit."""

from pathlib import Path

from pydantic import model_validator

from laminar.config.cluster import ClusterConfig, FaultsConfig, ObserveConfig, RelayConfig
from laminar.config.data import BatchConfig, BufferConfig, DataConfig, ModelConfig
from laminar.config.rollout import (
    EmbeddedEngineConfig,
    EngineConfig,
    EvaluationConfig,
    PacedConfig,
    RepackConfig,
    RewardConfig,
    RolloutConfig,
)
from laminar.config.sandbox import LocalSandboxConfig, SandboxConfig
from laminar.config.schedule import (
    OneStepStaleSchedule,
    ScheduleConfig,
    StreamingSchedule,
    TrajectoryLevelSchedule,
)
from laminar.config.section import Section
from laminar.config.simulation import SimulationConfig
from laminar.config.train import CheckpointConfig, TrainerConfig


class Config(Section):
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = TrajectoryLevelSchedule()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EmbeddedEngineConfig()
    repack: RepackConfig = RepackConfig()
    relay: RelayConfig = RelayConfig()
    trainer: TrainerConfig = TrainerConfig()
    buffer: BufferConfig = BufferConfig()
    sandbox: SandboxConfig = LocalSandboxConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()
    simulation: SimulationConfig = SimulationConfig()
    run_dir: Path = Path("runs/run")
    """Folder for everything the run writes."""
    seed: int = 0
    """Prompt order, sampling and initialisation all derive from it."""

    def num_steps(self, num_prompts: int) -> int:
        """How many steps a run on so many prompts makes in all, if nothing is dropped."""
        in_data = -(-self.data.num_epochs * num_prompts // self.batch.num_prompts_per_step)
        return min(in_data, self.trainer.num_steps or in_data)

    @property
    def num_trajectory_tokens_max(self) -> int:
        """Tokens of the longest trajectory, its prompt included."""
        return self.data.prompt_tokens_max + self.data.response_tokens_max

    @property
    def paced(self) -> PacedConfig | None:
        """What the engine's steps are held back to, if they are."""
        return self.engine.paced if isinstance(self.engine, EmbeddedEngineConfig) else None

    @property
    def scored_by(self) -> str:
        """What gives rewards: the function that is named, else the environment, else the rule `math_answer`."""
        return self.reward.function or self.rollout.environment or "math_answer"

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.buffer.capacity_steps < 1:
            raise ValueError(
                f"buffer.capacity_steps={self.buffer.capacity_steps} holds less than one step, so no step would "
                "ever start; set it to 1 or more"
            )
        if isinstance(self.schedule, OneStepStaleSchedule | StreamingSchedule) and self.buffer.capacity_steps < 2:
            raise ValueError(
                f"buffer.capacity_steps={self.buffer.capacity_steps:g} has no room for the batch that "
                f"schedule.kind={self.schedule.kind} generates while another is trained; set it to 2 or more"
            )
        if self.batch.num_prompts_per_step % self.batch.num_mini_batches:
            raise ValueError(
                f"batch.num_mini_batches={self.batch.num_mini_batches} does not divide "
                f"batch.num_prompts_per_step={self.batch.num_prompts_per_step}; set it to a divisor"
            )
        if self.evaluation.interval_steps and not self.data.val_files:
            raise ValueError("evaluation.interval_steps is set but data.val_files is empty; name a file or unset it")
        if self.relay.port and self.cluster.address == "local" and self.cluster.num_machines > 1:
            raise ValueError(
                f"relay.port={self.relay.port} cannot serve cluster.num_machines={self.cluster.num_machines} emulated "
                "machines, which share this one's ports; leave it at 0"
            )
        if self.rollout.report_interval_s > self.faults.report_deadline_s / 2:
            raise ValueError(
                f"rollout.report_interval_s={self.rollout.report_interval_s:g} leaves no room in "
                f"faults.report_deadline_s={self.faults.report_deadline_s:g}: every replica would be taken for lost; "
                "set the deadline to twice the interval or more"
            )
        if self.trainer.learning_rate_schedule != "constant" and self.trainer.num_steps is None:
            raise ValueError(
                f"trainer.learning_rate_schedule={self.trainer.learning_rate_schedule} falls until the last step, and "
                "trainer.num_steps does not say which that is; set it (`laminar run --dry-run` counts the steps that "
                "the data gives)"
            )
        if self.trainer.overlong.buffer_tokens > self.data.response_tokens_max:
            raise ValueError(
                f"trainer.overlong.buffer_tokens={self.trainer.overlong.buffer_tokens} is more than "
                f"data.response_tokens_max={self.data.response_tokens_max}: the reward would sink from the first token "
                "on; lower it"
            )
        rollout = self.rollout
        if rollout.environment == "math_with_code" and rollout.num_turns_max < 2:
            raise ValueError(
                f"rollout.num_turns_max={rollout.num_turns_max} leaves no turn after a tool call; set it to "
                "rollout.num_tool_calls_max + 1"
            )
        longest, room = self.num_trajectory_tokens_max, self.engine.kv_tokens_max
        if room is not None and longest > room:
            raise ValueError(
                f"one trajectory may need data.prompt_tokens_max + data.response_tokens_max = {longest} KV tokens, "
                f"more than engine.kv_capacity_tokens={self.engine.kv_capacity_tokens} holds in whole blocks of "
                f"engine.block_tokens={self.engine.block_tokens}; raise the capacity"
            )
        return self
