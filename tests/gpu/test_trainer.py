"""One rank on an accelerator: FSDP2 with NCCL does what the CPU does, and bfloat16 stays near the engine."""

import pytest
import torch

from laminar.train.ranks import ALONE
from laminar.train.trainer import Trainer
from tests.train.rank_processes import on_ranks
from tests.train.rank_work import gradients_of, restored, train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(600),
]


def test_a_step_in_float32_is_that_of_the_cpu(qwen2_path, make_config, sample, tmp_path):
    cpu = make_config(qwen2_path)
    cuda = make_config(qwen2_path, device="cuda", compute_dtype="float32", micro_batch_tokens_max=160)
    trainer = Trainer(cpu)
    experiences = sample(trainer.model, 4)
    trainer.save(tmp_path)
    (got,) = on_ranks(cuda, gradients_of, [(cuda, tmp_path, experiences)])
    (expected,) = gradients_of(ALONE, [(cpu, tmp_path, experiences)])
    assert ((got[0].cpu() - expected).norm() / expected.norm()).item() < 1e-3


def test_a_step_in_bfloat16_trains_float32_weights_near_what_sampled_them(qwen2_path, make_config, sample, tmp_path):
    cuda = make_config(qwen2_path, device="cuda")
    experiences = sample(Trainer(make_config(qwen2_path)).model, 4)
    (trained,) = on_ranks(cuda, train_steps, cuda, [experiences], tmp_path)
    (metrics,) = trained["metrics"]
    assert metrics["training/engine_mismatch/logprob_diff_mean"] < 5e-2
    assert metrics["rollout_corr/k3_kl"] < 1e-2
    assert metrics["actor/num_updates_skipped"] == 0
    assert {str(dtype) for dtype in trained["dtypes"]} == {"torch.float32"}


def test_its_checkpoint_is_read_on_the_cpu(qwen2_path, make_config, sample, tmp_path):
    cuda, cpu = make_config(qwen2_path, device="cuda"), make_config(qwen2_path)
    experiences = sample(Trainer(cpu).model, 4)
    (trained,) = on_ranks(cuda, train_steps, cuda, [experiences], tmp_path)
    before, _ = restored(ALONE, cpu, tmp_path, experiences)
    assert [n for n, tensor in before["state"].items() if not tensor.equal(trained["state"][n].cpu())] == []
