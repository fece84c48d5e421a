"""Checks everything a run needs and prints the resolved settings, without starting anything."""

import msgspec
from omegaconf import OmegaConf

from laminar.config import Config, TrainerConfig, VllmEngineConfig
from laminar.rollout.engines.architecture import Architecture, read_architecture
from laminar.rollout.engines.memory import ELEMENT_BYTES, RUNTIME_BYTES, gpu_memory, num_parameters, tell

GIB = 2**30
PUBLISHED_ELEMENT_BYTES = 4
NUM_PUBLISHED_SEGMENTS = 2
"""The trainer's: one is filled while the other is sent."""
STATE_BYTES = 16
"""Of a parameter that is trained, all in float32: itself, its gradient, and AdamW's two moments."""
FROZEN_BYTES = 4
"""Of a parameter of the initial weights, to which the KL is taken."""


def dry_run(config: Config) -> int:
    """Load data, model description and user code as a run would. Raises ValueError for what is wrong."""
    from laminar.run import check_engine, check_model, check_sandbox, check_user_code, load_data

    prompts, heldout = load_data(config)
    check_model(config)
    check_engine(config)
    check_user_code(config)
    check_sandbox(config)
    print(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))
    print(f"# {len(prompts)} prompts, {len(heldout)} held out; {config.num_steps(len(prompts))} steps of")
    print(f"# {config.batch.num_prompts_per_step} prompts x {config.batch.group_size} trajectories")
    for line in tell_memory(config):
        print(f"# {line}")
    print("# everything is in order; nothing was started")
    return 0


def tell_memory(config: Config) -> list[str]:
    """What weights take in host memory, and what a replica takes on its GPUs: the arithmetic, not a measurement."""
    architecture = read_architecture(config.model.path)
    version_gib = num_parameters(architecture) * PUBLISHED_ELEMENT_BYTES / GIB
    num_kept = config.relay.num_versions_kept
    lines = [
        f"a weight version is {version_gib:.3g} GiB (float32); each machine's relay holds {num_kept} of them: "
        f"{num_kept * version_gib:.3g} GiB of host memory, trainer {NUM_PUBLISHED_SEGMENTS * version_gib:.3g} GiB more"
    ]
    match config.engine:
        case VllmEngineConfig(device="cuda"):
            longest = config.num_trajectory_tokens_max
            num_gpus = config.rollout.num_replicas * config.engine.tensor_parallel_size
            lines.append(f"{config.rollout.num_replicas} replicas on {num_gpus} GPUs")
            lines += tell(config.engine, gpu_memory(config.engine, architecture), architecture, num_tokens_max=longest)
        case _:
            pass
    if config.trainer.device == "cuda":
        lines += _tell_trainer(config, architecture)
    return lines


def _tell_trainer(config: Config, architecture: Architecture) -> list[str]:
    """Raises ValueError, with the arithmetic in it, if a rank cannot have the room that it needs."""
    memory, ranks = rank_memory(config.trainer, architecture), config.trainer.num_ranks
    lines = [
        f"{ranks} trainer ranks on {ranks} GPUs",
        f"{num_parameters(architecture) / 1e9:.2f} G parameters x {memory.bytes_per_parameter} bytes (float32 weights, "
        f"gradients, AdamW) / {ranks} = {memory.state_bytes / GIB:.1f} GiB on the GPU of a rank",
        f"{memory.state_bytes / GIB:.1f} state + {memory.gathered_bytes / GIB:.1f} gathered layers and head + "
        f"{memory.kept_bytes / GIB:.1f} activations of {config.trainer.micro_batch_tokens_max:,} tokens + "
        f"{RUNTIME_BYTES / GIB:.1f} runtime = {memory.needed_bytes / GIB:.1f} GiB",
    ]
    match config.engine:
        case VllmEngineConfig(device_memory_gib=gib) if memory.needed_bytes > gib * GIB:
            raise ValueError(
                f"a trainer rank does not fit engine.device_memory_gib={gib:g}: {lines[-1]}; raise trainer.num_ranks, "
                "set trainer.activation_checkpointing, or lower trainer.micro_batch_tokens_max"
            )
        case _:
            return lines


class RankMemory(msgspec.Struct, frozen=True):
    """Bytes on the GPU of a trainer rank. gathered: what is whole while it computes; kept: activations."""

    bytes_per_parameter: int
    state_bytes: int
    gathered_bytes: int
    kept_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.state_bytes + self.gathered_bytes + self.kept_bytes + RUNTIME_BYTES


def rank_memory(config: TrainerConfig, architecture: Architecture) -> RankMemory:
    """State is split over the ranks; activations are those of a full micro-batch."""
    a, size = architecture, num_parameters(architecture)
    element_bytes = ELEMENT_BYTES[config.compute_dtype or "bfloat16"]
    embedding = a.vocab_size * a.hidden_size
    layer = (size - embedding) // a.num_layers
    bytes_per_parameter = STATE_BYTES + (FROZEN_BYTES if config.kl_coefficient else 0)
    # The layer that computes, the next one, embedding and head; and the head's gradient, in float32.
    gathered = element_bytes * (2 * layer + 2 * embedding) + 4 * embedding
    # For its backward pass a layer keeps the inputs of its norms, its matrices and its attention.
    of_layer = 6 * a.hidden_size + 4 * a.intermediate_size
    of_token = a.num_layers * a.hidden_size + of_layer if config.activation_checkpointing else a.num_layers * of_layer
    kept = element_bytes * config.micro_batch_tokens_max * of_token
    return RankMemory(bytes_per_parameter, bytes_per_parameter * size // config.num_ranks, gathered, kept)
