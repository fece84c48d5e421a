"""Settings of generation: engines, replicas, repack, rewards, evaluation."""

from typing import Annotated, Literal

from pydantic import Field

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


class RewardConfig(Section):
    function: Literal["math_answer", "dapo", "math_verify"] | FunctionPath = "math_answer"
    """`path.py:name` of a verl-style compute_score, or a rule: exact match of the last `Answer:` or box, 1 or 0; that
    of DAPO, 1 or -1; equality in value by math-verify (the `math` extra), 1 or 0."""
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
