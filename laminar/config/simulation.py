"""Settings of the simulator: the cluster that `laminar sim` pretends to have. A live run does not read them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from laminar.config.section import Count, Fraction, Seconds, Section

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class KnownModel(Section):
    """One of the models whose step times are on record."""

    kind: Literal["known"] = "known"
    """Its size and step times come with Laminar."""
    name: Literal["qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b"] = "qwen2.5-32b"
    """Which one."""


class DescribedModel(Section):
    """Any other model; its step times must be given in `simulation.decode`."""

    kind: Literal["described"] = "described"
    """Its size is given here."""
    num_parameters: Positive
    """Weights, held in bf16."""
    num_layers: Count
    """Layers that have a KV cache."""
    kv_bytes_per_token: Count
    """KV cache of one token over all layers: 2 x layers x KV heads x head size x bytes a number."""


class MeasuredDecode(Section):
    """Measured kernels of the accelerator, plus an engine overhead that was fitted to published runs."""

    kind: Literal["measured"] = "measured"
    """From the tables that come with Laminar, interpolated in batch and context."""


class CoefficientsDecode(Section):
    """Step times as a replica of yours reports them (`DecodeCost` in docs/messages.md)."""

    kind: Literal["coefficients"] = "coefficients"
    """Linear in KV tokens and in running trajectories."""
    floor_s: Seconds
    """A decode step with nothing in it."""
    per_kv_token_s: NonNegative
    """More for every token in the KV cache that the step reads."""
    per_running_s: NonNegative
    """More for every running trajectory."""
    prefill_s_per_token: NonNegative
    """To take in one token of a prompt, or of a response that goes on elsewhere."""


class PublishedLengths(Section):
    """Response lengths as published (Laminar, figure 17), by digitised quantiles."""

    kind: Literal["published"] = "published"
    """Of the checkpoints that the paper measured."""
    name: Literal["7B_math", "32B_math", "72B_math", "7B_tool"] = "32B_math"
    """Which checkpoint."""


class LognormalLengths(Section):
    """Lognormal response lengths."""

    kind: Literal["lognormal"] = "lognormal"
    """Cut at `data.response_tokens_max`."""
    median_tokens: Positive
    """Half of the responses are shorter."""
    log_sd: NonNegative
    """Standard deviation of the logarithm; 0.6 puts the 99th percentile at 4 medians."""


class LengthsFile(Section):
    """Response lengths of your own, drawn with replacement."""

    kind: Literal["file"] = "file"
    """One length a line, or a JSON list of lengths."""
    path: Path
    """A text file, or one that ends in .json."""


class LengthsOfRun(Section):
    """The response lengths of a run, from its event log."""

    kind: Literal["run"] = "run"
    """Drawn with replacement from the training trajectories that finished."""
    path: Path
    """The run's folder (its `run_dir`)."""


LengthsConfig = Annotated[PublishedLengths | LognormalLengths | LengthsFile | LengthsOfRun, Field(discriminator="kind")]


class PublishedLatency(Section):
    """Latency of a code sandbox as published (Laminar, figure 2): median 21 s, 99th percentile 395 s."""

    kind: Literal["published"] = "published"
    """By digitised quantiles."""


class LognormalLatency(Section):
    """Lognormal latency."""

    kind: Literal["lognormal"] = "lognormal"
    """Of every call on its own."""
    median_s: Seconds
    """Half of the calls are faster."""
    log_sd: NonNegative
    """Standard deviation of the logarithm."""


class LatencyFile(Section):
    """Latencies of your own, drawn with replacement."""

    kind: Literal["file"] = "file"
    """Seconds: one a line, or a JSON list."""
    path: Path
    """A text file, or one that ends in .json."""


class ToolsConfig(Section):
    """Turns: a response is interrupted by tool calls, and the replica decodes others meanwhile."""

    num_calls_max: Count = 8
    """A trajectory makes 0 to so many calls, all equally likely, evenly spread over its response."""
    latency: Annotated[PublishedLatency | LognormalLatency | LatencyFile, Field(discriminator="kind")] = (
        PublishedLatency()
    )


class TrainingTimeConfig(Section):
    """Seconds that the trainer takes for a million tokens: fixed + gpu / GPUs. None: as fitted, by parameters."""

    fixed_s_per_mtoken: NonNegative | None = None
    """The part that more GPUs do not make shorter."""
    gpu_s_per_mtoken: NonNegative | None = None
    """The part that is shared out among the trainer's GPUs, in GPU seconds."""
    preparation_share: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """How much of it is experience preparation, which comes before the updates (Laminar: 7.3 % of an iteration)."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> "TrainingTimeConfig":
        if (self.fixed_s_per_mtoken is None) != (self.gpu_s_per_mtoken is None):
            raise ValueError(
                "fixed_s_per_mtoken and gpu_s_per_mtoken belong together; set both, or neither for the fitted ones"
            )
        return self


class WeightsTimeConfig(Section):
    """How long weights take from the trainer to a replica."""

    broadcast: Literal["published", "formula"] = "published"
    """`published`: the measured curve of H800 machines (Laminar, figure 18); `formula`: T* from `relay.link_*`."""
    publish_bytes_per_s: Positive = 103e9
    """Trainer to master relay: the trainer waits for it."""
    load_bytes_per_s: Positive = 115e9
    """A machine's relay to one of its replicas."""


class SimulationConfig(Section):
    num_gpus: Count = 128
    """Accelerators, trainer and replicas together."""
    num_train_gpus: Count | None = None
    """Accelerators of the trainer, the others generate; none: half. Without meaning where both share all of them."""
    num_gpus_per_machine: Count = 8
    """Accelerators a machine; each machine with replicas has a relay."""
    tensor_parallel: Count = 4
    """Accelerators a replica."""
    accelerator: Literal["h800", "h100", "h200"] = "h800"
    """Whose memory and step times."""
    model: Annotated[KnownModel | DescribedModel, Field(discriminator="kind")] = KnownModel()
    gpu_memory_share: Fraction = 0.9
    """Of an accelerator's memory for weights, activations and KV cache."""
    num_running_max: Count = 1024
    """Trajectories that a replica decodes at once, if their KV fits."""
    block_tokens: Count = 16
    """Tokens a KV block."""
    decode: Annotated[MeasuredDecode | CoefficientsDecode, Field(discriminator="kind")] = MeasuredDecode()
    lengths: LengthsConfig = PublishedLengths()
    prompt_tokens: Count = 90
    """Tokens a prompt."""
    tools: ToolsConfig | None = None
    training: TrainingTimeConfig = TrainingTimeConfig()
    weights: WeightsTimeConfig = WeightsTimeConfig()
    reward_s: NonNegative = 1.0
    """From a reported response to its score."""
    replica_start_s: Seconds = 60.0
    """From the order to start a replica until it serves."""
    trainer_start_s: Seconds = 120.0
    """From the order to start a lost trainer again until it has restored its newest checkpoint."""
    num_steps: Count = 15
    """Steps to simulate."""
    num_warmup_steps: Annotated[int, Field(ge=0)] = 10
    """The first so many are not measured."""
    report_interval_s: Seconds = 5.0
    """How often a busy replica reports. Live reports come much more often; here each one is an event to pay for."""
    heartbeat_interval_s: Seconds = 30.0
    """How often whoever has nothing to tell reports. `faults.report_deadline_s` is raised to 2.5 times this."""

    @model_validator(mode="after")
    def _something_to_measure(self) -> "SimulationConfig":
        if self.num_warmup_steps >= self.num_steps:
            raise ValueError(
                f"num_warmup_steps={self.num_warmup_steps} leaves none of num_steps={self.num_steps} to measure; "
                "lower it"
            )
        return self
