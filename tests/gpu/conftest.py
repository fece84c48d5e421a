"""Skips visibly where there is no accelerator; the trainer's fixtures serve here as well."""

import pytest
import torch

from tests.train.conftest import make_config, make_model, qwen2_path, sample

__all__ = ["make_config", "make_model", "qwen2_path", "sample"]


@pytest.fixture(autouse=True, scope="session")
def _an_accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
