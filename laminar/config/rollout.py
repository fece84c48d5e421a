"""Settings of generation: engines, replicas, repack, rewards, evaluation."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from laminar.config.section import Count, Fraction, FunctionPath, Seconds, Section


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
    kept_kv_share_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the KV budget that may stay with trajectories that wait for a tool; the oldest goes when more is needed.
    0: given up at once, and computed again."""
    prefill_chunk_tokens: Count = 256
    """Prompt tokens of one trajectory taken in by one engine step."""
    paced: PacedConfig | None = None
    """Off by default; when on, every report says so."""

    @property
    def num_gpus(self) -> int:
        """That one replica reserves."""
        return 0

    @property
    def kv_tokens_max(self) -> int:
        """What one trajectory may take: the budget in whole blocks."""
        return self.kv_capacity_tokens // self.block_tokens * self.block_tokens


class VllmEngineConfig(Section):
    """vLLM, in processes of its own beside the replica's: one for its scheduler, one for each tensor-parallel rank."""

    kind: Literal["vllm"] = "vllm"
    """Which engine decodes; this one is an extra: `pip install 'laminar-rl[vllm]'`."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What vLLM was installed for; with `cuda` a replica reserves `tensor_parallel_size` GPUs of its machine."""
    tensor_parallel_size: Count = 1
    """GPUs of one replica, all in one machine."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What the weights are served in, whatever they are published in; also the dtype of the KV cache."""
    num_slots: Count = 256
    """Trajectories that may decode at once."""
    kv_capacity_tokens: Count | None = None
    """KV budget, in tokens; none: what `device_memory_ratio` leaves beside the weights. Needed with `cpu`."""
    block_tokens: Annotated[int, Field(gt=0, multiple_of=16)] = 32
    """Tokens a KV block; with `cpu` a multiple of 32."""
    prefill_chunk_tokens: Count = 8192
    """Tokens, of prompts and of trajectories that decode, taken in by one engine step."""
    device_memory_ratio: Fraction = 0.85
    """Share of each GPU's memory that the engine takes: weights, KV cache and activations."""
    device_memory_gib: Annotated[float, Field(gt=0)] = 80.0
    """Memory of one GPU, for the arithmetic of `--dry-run` alone; a run measures it."""
    eager: bool = False
    """Whether to do without CUDA graphs and compilation: starts sooner, decodes slower."""
    step_deadline_s: Seconds = 60.0
    """An engine that has work and makes no step for so long is taken for dead."""

    @property
    def num_gpus(self) -> int:
        """That one replica reserves."""
        return self.tensor_parallel_size if self.device == "cuda" else 0

    @property
    def kv_tokens_max(self) -> int | None:
        """What one trajectory may take: the budget in whole blocks; none: known only once the engine is up."""
        if self.kv_capacity_tokens is None:
            return None
        return self.kv_capacity_tokens // self.block_tokens * self.block_tokens

    @model_validator(mode="after")
    def _fits_device(self) -> "VllmEngineConfig":
        if self.device == "cpu" and self.kv_capacity_tokens is None:
            raise ValueError(
                "kind: vllm with device: cpu needs kv_capacity_tokens: memory of the host is not the engine's to fill"
            )
        if self.device == "cpu" and self.block_tokens % 32:
            raise ValueError(f"block_tokens={self.block_tokens} with device: cpu; set it to a multiple of 32")
        return self


def _engine_kind(engine: Any) -> str:
    """Settings that name no kind are the embedded engine's."""
    match engine:
        case {"kind": kind}:
            return str(kind)
        case VllmEngineConfig():
            return engine.kind
        case _:
            return "embedded"


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")] | Annotated[VllmEngineConfig, Tag("vllm")],
    Discriminator(_engine_kind),
]


class RolloutConfig(Section):
    num_replicas: Count = 4
    """Copies of the policy that generate, spread over the machines as evenly as their GPUs allow."""
    num_groups_per_replica_max: Count = 64
    """Prompt groups in one closed batch of a replica."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of training trajectories; log-probs are taken at the same."""
    report_interval_s: Seconds = 0.1
    """How often a replica reports; a report is also its heartbeat."""
    move_kv: bool = False
    """Whether a trajectory that moves within a machine takes its KV cache along, where engines can (embedded)."""
    environment: Literal["math_with_code"] | FunctionPath | None = None
    """`math_with_code`, or `path.py:Class` of one of yours (laminar/envs/env.py); none: single-turn."""
    environment_timeout_s: Seconds = 60.0
    """An environment that takes longer for one observation fails the trajectory by name."""
    num_turns_max: Count = 9
    """Turns of one trajectory in such an environment: eight calls, and the answer."""
    observation_tokens_max: Count | None = None
    """Tokens of one observation; longer outputs are cut in their middle. None: what the response has left."""
    num_tool_calls_max: Count = 8
    """Tool calls of one trajectory of math_with_code; further ones are not executed, and the model is told."""
    tool_format: Literal["auto", "template", "tags"] = "auto"
    """How math_with_code's calls are written: as the tokenizer's chat template has it, or `<code>…</code>`.
    `auto`: by the template if the tokenizer has one."""
    parallel_tool_calls: bool = False
    """With the template: whether a message may hold several calls. If not, the first `</tool_call>` ends the turn."""


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


class RewardConfig(Section):
    function: Literal["math_answer", "dapo", "math_verify"] | FunctionPath | None = None
    """`path.py:name` of a verl-style compute_score, or a rule: exact match of the last `Answer:` or box, 1 or 0; that
    of DAPO, 1 or -1; equality in value by math-verify (the `math` extra), 1 or 0. None: the environment's `score`,
    `math_answer` unless it says otherwise."""
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
    """Responses a held-out problem: the k of avg@k, and the largest of pass@k."""
    pass_score_min: float = 1.0
    """A response passes if its score is at least this."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: greedy."""
    top_p: Fraction = 1.0
    """Nucleus sampling; evaluation only."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: off; evaluation only."""
