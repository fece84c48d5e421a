"""The trainer's tiny models and sampled trajectories, and a run and relays, as their own tests have them."""

from tests.relay.conftest import run_id, start_relay
from tests.train.conftest import make_config, make_model, qwen2_path, sample

__all__ = ["make_config", "make_model", "qwen2_path", "run_id", "sample", "start_relay"]
