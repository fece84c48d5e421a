"""Checks everything a run needs and prints the resolved settings, without starting anything."""

from omegaconf import OmegaConf

from laminar.config import Config, VllmEngineConfig

GIB = 2**30
PUBLISHED_ELEMENT_BYTES = 4
NUM_PUBLISHED_SEGMENTS = 2
"""The trainer's: one is filled while the other is sent."""


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
    from laminar.rollout.engines.architecture import read_architecture
    from laminar.rollout.engines.memory import gpu_memory, num_parameters, tell

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
    return lines
