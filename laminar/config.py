"""Names every setting of a run, with its default, unit and meaning. `laminar config` prints this file as a table."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
FunctionPath = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """A group of settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: Path
    """Folder of a Hugging Face causal LM (Qwen2, Qwen3 or Llama): config.json, safetensors, tokenizer."""


class DataConfig(Section):
    train_files: tuple[Path, ...]
    """Parquet, json or jsonl files in verl's schema; read in this order."""
    val_files: tuple[Path, ...] = ()
    """Held-out problems, same schema; used by evaluation only."""
    prompt_key: str = "prompt"
    """Column with the prompt: chat messages, or plain text."""
    prompt_tokens_max: Count = 2048
    """Longer prompts are left out, and counted."""
    response_tokens_max: Count = 8192
    """A trajectory is cut here (tokens, tool output included) and counts as truncated."""
    num_epochs: Count = 1
    """Passes over the training prompts; the last, smaller step is trained too."""
    shuffle: bool = True
    """Whether each epoch visits the prompts in a new order, drawn from `seed`."""
    dedup: bool = False
    """Whether identical prompts are kept once; duplicates are counted and reported either way."""


class BatchConfig(Section):
    num_prompts_per_step: Count = 512
    """Prompt groups trained on between two weight versions."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Trajectories a prompt group."""
    num_mini_batches: Count = 16
    """Optimizer updates a step; each takes an equal share of the step's prompt groups."""

    @property
    def num_trajectories_per_step(self) -> int:
        return self.num_prompts_per_step * self.group_size


class TrajectoryLevelSchedule(Section):
    """Each replica takes the newest weights when its own batch ends (Laminar)."""

    kind: Literal["trajectory_level"] = "trajectory_level"
    """Nobody waits: a replica whose batch has ended goes on with the newest weights."""


class SynchronousSchedule(Section):
    """All replicas generate the step's batch, all stop, all load (verl)."""

    kind: Literal["synchronous"] = "synchronous"
    """Everybody waits: generation, training and loading take turns."""


ScheduleConfig = Annotated[TrajectoryLevelSchedule | SynchronousSchedule, Field(discriminator="kind")]


class PacedConfig(Section):
    """Makes each engine step last at least as long as a named accelerator's would, scaled to the tiny model."""

    accelerator: Literal["h800-qwen2.5-32b-tp4"] = "h800-qwen2.5-32b-tp4"
    """Whose decode coefficients (laminar/control/costs.py) to imitate."""
    time_scale: Annotated[float, Field(gt=0)] = 0.2
    """Seconds here for a second there."""
    batch_scale: Annotated[float, Field(gt=0)] = 8.0
    """Trajectories there for one trajectory here; KV tokens are scaled by the two KV capacities."""


class EmbeddedEngineConfig(Section):
    """Laminar's own continuous-batching engine on CPU, one thread a replica."""

    kind: Literal["embedded"] = "embedded"
    """Which engine decodes; this one is in the replica's own process."""
    num_slots: Count = 64
    """Trajectories that may decode at once."""
    kv_capacity_tokens: Count = 65536
    """KV budget, in tokens; admission and utilization count whole blocks of it."""
    block_tokens: Count = 16
    """Tokens a logical KV block."""
    prefill_chunk_tokens: Count = 256
    """Prompt tokens of one trajectory taken in by one engine step."""
    paced: PacedConfig | None = None
    """Off by default; when on, every report says so."""


EngineConfig = EmbeddedEngineConfig


class RolloutConfig(Section):
    num_replicas: Count = 4
    """Copies of the policy that generate, spread evenly over the machines."""
    num_groups_per_replica_max: Count = 64
    """Prompt groups in one closed batch of a replica."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of training trajectories; log-probs are taken at the same."""
    report_interval_s: Seconds = 0.1
    """How often a replica reports; a report is also its heartbeat."""
    environment: FunctionPath | None = None
    """`path.py:Class` of an environment with turns (laminar/envs/env.py); none: single-turn."""
    environment_timeout_s: Seconds = 60.0
    """An environment that takes longer for one observation fails the trajectory by name."""
    num_turns_max: Count = 8
    """Turns of one trajectory in such an environment."""


class RepackConfig(Section):
    enabled: bool = True
    """Whether the long tails of several replicas are moved onto few (trajectory_level only)."""
    check_interval_s: Seconds = 5.0
    """How often tails are looked for; also looked for right after every publish."""
    kv_utilization_max: Fraction = 0.99
    """C_max: a destination is filled up to this KV utilization."""
    decode_batch_max: Count | None = None
    """B: trajectories a destination may hold; none: computed from the decode cost and the tolerance."""
    decode_latency_tolerance: Annotated[float, Field(gt=1)] = 1.7
    """A step at batch B may take this many times a step at batch 1."""


class RelayConfig(Section):
    num_versions_kept: Annotated[int, Field(ge=3)] = 4
    """Weight versions a relay holds at most; the oldest that nobody serves goes first."""
    chunk_bytes: Count | None = None
    """Bytes a chunk; none: from the link's start-up time and bandwidth (T* formula)."""
    link_startup_s: Annotated[float, Field(ge=0)] = 5e-6
    """Start-up time of one message on the link between machines."""
    link_bytes_per_s: Annotated[float, Field(gt=0)] = 3e9
    """Bandwidth of the link between machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of every relay; 0: any free one."""
    publish_deadline_s: Seconds = 60.0
    """Longest wait for the previous hand-over to be sent, and for a version to be complete everywhere."""
    lease_deadline_s: Seconds = 60.0
    """A reader that holds a version longer is taken for dead and its segment is abandoned."""
    refresh_wait_max_s: Seconds = 2.0
    """A replica waits this long at most for a version that is on its way."""


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
    micro_batch_tokens_max: Count = 16384
    """Padded tokens in one forward-backward."""
    num_steps: Count | None = None
    """Stop after this many steps; none: at the end of the data."""
    work_deadline_s: Seconds = 600.0
    """A trainer that needs longer for one mini-batch, hand-over or checkpoint is taken for lost."""


class BufferConfig(Section):
    capacity_steps: Annotated[float, Field(gt=0)] = 4.0
    """Steps' worth of prompt groups that may be dispatched and not yet trained; less than 1 is refused."""
    filter_equal_rewards: bool = False
    """Whether groups whose rewards are all equal are dropped, by name, and replaced."""
    max_refill_factor: Annotated[float, Field(ge=1)] = 3.0
    """With the filter on: prompt groups dispatched for one step at most, in steps."""


class RewardConfig(Section):
    function: FunctionPath | None = None
    """`path.py:name` of a verl-style compute_score; none: exact match of the last `Answer:` line."""
    timeout_s: Seconds = 10.0
    """A call that takes longer is killed, counted, and tried once more; then its trajectory is dropped by name."""
    num_workers: Count = 1
    """Reward processes on each machine."""


class EvaluationConfig(Section):
    interval_steps: Count | None = None
    """Evaluate every so many steps, besides the first and last version; none: never."""
    num_prompts_max: Count = 512
    """Held-out problems an evaluation: the first ones of `data.val_files`."""
    num_responses_per_prompt: Count = 1
    """Responses a held-out problem."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: greedy."""
    top_p: Fraction = 1.0
    """Nucleus sampling; evaluation only."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: off; evaluation only."""


class CheckpointConfig(Section):
    interval_steps: Count = 20
    """Save every so many steps, and at the last; experience is kept until a checkpoint covers it."""
    num_kept: Count = 2
    """Complete checkpoints kept; older ones are deleted."""


class FaultsConfig(Section):
    report_deadline_s: Seconds = 5.0
    """A replica or relay that reports nothing for so long is taken for lost."""
    start_deadline_s: Seconds = 300.0
    """A process that is not ready after this long fails the start, by name."""
    load_deadline_s: Seconds = 60.0
    """A replica that loads weights for longer is taken for lost."""
    num_replacements_max: Annotated[int, Field(ge=0)] = 16
    """Replicas and relays replaced in one start of a run; beyond, losses are no longer made good."""


class ClusterConfig(Section):
    address: str = "local"
    """`local` starts Ray on this machine; `auto` or host:port joins a running cluster."""
    num_machines: Count = 1
    """With `local`: emulated machines, each with its own relay and its share of the replicas."""
    cpus_per_process: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that Ray reserves for a replica or a trainer rank on a joined cluster; `local` reserves none."""


class ObserveConfig(Section):
    tensorboard: bool = True
    """Whether metrics also go to TensorBoard files in the run's folder; metrics.jsonl always does."""
    snapshot_interval_events: Count = 20000
    """Events between two snapshots of the control state, where the event log rotates."""


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
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()
    run_dir: Path = Path("runs/run")
    """Folder for everything the run writes."""
    seed: int = 0
    """Prompt order, sampling and initialisation all derive from it."""

    def num_steps(self, num_prompts: int) -> int:
        """How many steps a run on so many prompts makes in all, if nothing is dropped."""
        in_data = -(-self.data.num_epochs * num_prompts // self.batch.num_prompts_per_step)
        return min(in_data, self.trainer.num_steps or in_data)

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.buffer.capacity_steps < 1:
            raise ValueError(
                f"buffer.capacity_steps={self.buffer.capacity_steps} holds less than one step, so no step would "
                "ever start; set it to 1 or more"
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
        longest = self.data.prompt_tokens_max + self.data.response_tokens_max
        num_blocks = self.engine.kv_capacity_tokens // self.engine.block_tokens
        if longest > num_blocks * self.engine.block_tokens:
            raise ValueError(
                f"one trajectory may need data.prompt_tokens_max + data.response_tokens_max = {longest} KV tokens, "
                f"more than engine.kv_capacity_tokens={self.engine.kv_capacity_tokens} holds in whole blocks of "
                f"engine.block_tokens={self.engine.block_tokens}; raise the capacity"
            )
        return self
