"""Checks everything a run needs and prints the resolved settings, without starting anything."""

from omegaconf import OmegaConf

from laminar.config import Config


def dry_run(config: Config) -> int:
    """Load data, model description and user code as a run would. Raises ValueError for what is wrong."""
    from laminar.run import check_model, check_sandbox, check_user_code, load_data

    prompts, heldout = load_data(config)
    check_model(config)
    check_user_code(config)
    check_sandbox(config)
    print(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))
    print(f"# {len(prompts)} prompts, {len(heldout)} held out; {config.num_steps(len(prompts))} steps of")
    print(f"# {config.batch.num_prompts_per_step} prompts x {config.batch.group_size} trajectories")
    print("# everything is in order; nothing was started")
    return 0
