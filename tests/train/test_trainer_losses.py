"""What the trainer does around a loss: proximal and reference weights, aggregation, overlong responses, the split."""

import copy
import math
import statistics

import msgspec
import pytest
import torch

from laminar.config import OverlongConfig
from laminar.train.mini_batch import prepare
from laminar.train.overlong import overlong_punishments
from laminar.train.trainer import Trainer

KINDS = ("grpo", "decoupled_ppo", "tis", "cispo", "gspo", "dr_grpo")


def stale_batch(config, sample):
    """A trainer in the middle of its third step, and trajectories that its first weights sampled."""
    trainer = Trainer(config)
    behaviour = copy.deepcopy(trainer.model)
    for step in (1, 2):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step))
    experiences = sample(behaviour, 4, seed=9)
    trainer.train_mini_batch(3, 0, experiences)
    return trainer, experiences


def gradient(trainer, experiences):
    trainer.model.zero_grad()
    trainer.accumulate_gradient(prepare(experiences, trainer.config, trainer.version))
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


def logprobs_of(model, experience):
    used = torch.tensor([[*experience.prompt_token_ids, *experience.response.token_ids]])
    first = len(experience.prompt_token_ids) - 1
    with torch.no_grad():
        logits = model(input_ids=used).logits[0, first:-1]
    return logits.log_softmax(-1).gather(1, used[0, first + 1 :, None])[:, 0].tolist()


# -------------------------------------------------------------------------------------------------- law 6: the split


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_the_micro_batches(qwen2_path, make_config, sample, kind, aggregation):
    loss = {"kind": kind} if kind == "dr_grpo" else {"kind": kind, "aggregation": aggregation}
    trainer, experiences = stale_batch(
        make_config(qwen2_path, learning_rate=3e-3, loss=loss, kl_coefficient=0.1), sample
    )
    longest = max(len(e.prompt_token_ids) + len(e.response.token_ids) for e in experiences)
    gradients = []
    for num_rows in (1, 2, 8):
        trainer.config = trainer.config.model_copy(
            update={"trainer": trainer.config.trainer.model_copy(update={"micro_batch_tokens_max": num_rows * longest})}
        )
        gradients.append(gradient(trainer, experiences))
    assert gradients[0].norm() > 0
    for other in (*gradients[1:], gradient(trainer, experiences[::-1])):
        assert (other - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


# ------------------------------------------------------------------------------------ proximal and reference weights


@pytest.mark.parametrize("kind", ["decoupled_ppo", "tis"])
def test_the_proximal_policy_is_that_of_the_steps_first_weights(qwen2_path, make_config, sample, kind):
    config = make_config(qwen2_path, learning_rate=3e-3, loss={"kind": kind, "clip_ratio_c": None})
    trainer = Trainer(config)
    behaviour = copy.deepcopy(trainer.model)
    trainer.train_mini_batch(1, 0, sample(trainer.model, 4, seed=1))
    proximal = copy.deepcopy(trainer.model)
    experiences = sample(behaviour, 4, seed=9)
    trainer.train_mini_batch(2, 0, experiences[:8])
    policy = copy.deepcopy(trainer.model)
    metrics = trainer.train_mini_batch(2, 1, experiences[8:])

    mini_batch = prepare(experiences[8:], config, 0)
    loss = config.trainer.loss
    total, num_tokens = 0.0, 0
    for experience, advantage in zip(experiences[8:], mini_batch.advantages.tolist(), strict=True):
        for now, first, then in zip(
            logprobs_of(policy, experience),
            logprobs_of(proximal, experience),
            experience.response.logprobs,
            strict=True,
        ):
            ratio, weight = math.exp(now - first), math.exp(first - then)
            if kind == "tis":
                weight = min(weight, loss.weight_max)
            elif weight > loss.behaviour_weight_max:
                weight = 0.0
            bounded = min(max(ratio, 1 - loss.clip_ratio_low), 1 + loss.clip_ratio_high)
            total -= weight * min(ratio * advantage, bounded * advantage)
            num_tokens += 1
    assert metrics["actor/pg_clipfrac"] > 0, "else policy and proximal policy are too near to tell"
    assert metrics["actor/pg_loss"] == pytest.approx(total / num_tokens, abs=2e-6)


def test_the_reference_is_the_initial_weights_of_a_resumed_run_too(qwen2_path, make_config, sample, tmp_path):
    config = make_config(qwen2_path, learning_rate=5e-3, kl_coefficient=0.5)
    trainer = Trainer(config)
    initial = copy.deepcopy(trainer.model)
    first = trainer.train_mini_batch(1, 0, sample(trainer.model, 4))
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    trainer.save(tmp_path)
    resumed = Trainer(config)
    resumed.restore(tmp_path)

    experiences = sample(initial, 4, seed=3)
    estimates = []
    for experience in experiences:
        pairs = zip(logprobs_of(initial, experience), logprobs_of(resumed.model, experience), strict=True)
        estimates += [math.exp(reference - policy) - 1 - (reference - policy) for reference, policy in pairs]
    metrics = resumed.train_mini_batch(2, 0, experiences)
    assert metrics["actor/kl_loss"] == pytest.approx(statistics.mean(estimates), rel=1e-4)
    assert metrics["actor/kl_loss"] > 0.01
    assert metrics["actor/kl_coef"] == 0.5


def test_the_kl_draws_the_policy_back_where_rewards_teach_nothing(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path, learning_rate=2e-3, kl_coefficient=1.0))
    for step in (1, 2, 3):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step))
    equal = [msgspec.structs.replace(e, score=1.0) for e in sample(trainer.model, 4, seed=9)]
    distances = [trainer.train_mini_batch(step, 0, equal)["actor/kl_loss"] for step in range(4, 12)]
    assert distances[-1] < 0.8 * distances[0]


# ----------------------------------------------------------------------------------------------- overlong responses


def test_the_punishment_grows_over_the_buffer_and_not_beyond():
    config = OverlongConfig(buffer_tokens=4, penalty_max=0.5)
    lengths = torch.tensor([0, 16, 17, 18, 19, 20, 25])
    expected = [0, 0, -0.125, -0.25, -0.375, -0.5, -0.5]
    assert overlong_punishments(lengths, config, response_tokens_max=20).tolist() == expected
    assert overlong_punishments(lengths, OverlongConfig(), response_tokens_max=20).tolist() == [0] * 7


def test_a_long_response_has_less_reward_and_its_score_stays_in_the_metrics(qwen2_path, make_config, sample):
    config = make_config(qwen2_path, overlong={"buffer_tokens": 16})
    config = config.model_copy(update={"data": config.data.model_copy(update={"response_tokens_max": 32})})
    trainer = Trainer(config)
    experiences = sample(trainer.model, 4)
    lengths = [len(e.response.token_ids) for e in experiences]
    rewards = [e.score - min(1.0, max(0.0, (n - 16) / 16)) for e, n in zip(experiences, lengths, strict=True)]
    metrics = trainer.train_mini_batch(1, 0, experiences)
    assert metrics["critic/rewards/mean"] == pytest.approx(statistics.mean(rewards))
    assert metrics["critic/score/mean"] == pytest.approx(statistics.mean(e.score for e in experiences))
    assert metrics["critic/rewards/mean"] < metrics["critic/score/mean"]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
def test_a_filtered_trajectory_has_no_loss_and_counts_in_its_groups_mean(qwen2_path, make_config, sample, aggregation):
    loss = {"kind": "grpo", "aggregation": aggregation}
    plain = Trainer(make_config(qwen2_path, loss=loss))
    filtering = Trainer(make_config(qwen2_path, loss=loss, overlong={"filtered": True}))
    experiences = sample(plain.model, 2)
    cut = [msgspec.structs.replace(e, truncated=i == 0) for i, e in enumerate(experiences)]

    batch = prepare(cut, filtering.config, 0)
    assert batch.num_trained[0] == 0 and batch.num_trained[1] > 0
    assert torch.equal(batch.advantages, prepare(experiences, plain.config, 0).advantages)
    silent = copy.deepcopy(experiences)
    silent[0].response.loss_mask[:] = [0] * len(silent[0].response.loss_mask)
    torch.testing.assert_close(gradient(filtering, cut), gradient(plain, silent), atol=0, rtol=1e-5)


def test_a_run_in_which_every_response_is_truncated_and_filtered_trains_nothing(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path, overlong={"filtered": True}))
    before = copy.deepcopy(trainer.model)
    for step in (1, 2, 3):
        cut = [msgspec.structs.replace(e, truncated=True) for e in sample(trainer.model, 2, seed=step)]
        metrics = trainer.train_mini_batch(step, 0, cut)
        assert metrics["response_length/clip_ratio"] == 1
        assert metrics["actor/forwarded_token_ratio"] == 0
        assert all(math.isfinite(value) for value in metrics.values())
    pairs = zip(before.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


# -------------------------------------------------------------------------------------------------------- Dr. GRPO


def test_dr_grpo_divides_by_neither_length_nor_standard_deviation(qwen2_path, make_config, sample):
    config = make_config(qwen2_path, loss={"kind": "dr_grpo"})
    trainer = Trainer(config)
    experiences = sample(trainer.model, 3)
    total = 0.0
    for experience in experiences:
        mean = statistics.mean(other.score for other in experiences if other.group == experience.group)
        total -= (experience.score - mean) * len(experience.response.token_ids)
    metrics = trainer.train_mini_batch(1, 0, experiences)
    expected = total / (len(experiences) * config.data.response_tokens_max)
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)
