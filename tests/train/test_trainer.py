import copy
import math
import statistics
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from laminar.data.records import Experience, Response
from laminar.train.mini_batch import prepare
from laminar.train.packing import num_trained_tokens
from laminar.train.trainer import Trainer


def with_score(experience: Experience, score: float) -> Experience:
    return msgspec.structs.replace(experience, score=score)


def naive_loss(trainer: Trainer, experiences: list[Experience], temperature: float) -> float:
    """GRPO clip-higher with its dual clip, one Python float at a time, one unpadded row at a time."""
    total, num_tokens = 0.0, 0
    for experience in experiences:
        members = [other.score for other in experiences if other.group == experience.group]
        advantage = 0.0
        if len(set(members)) > 1:
            advantage = (experience.score - statistics.mean(members)) / (statistics.stdev(members) + 1e-6)
        token_ids = [*experience.prompt_token_ids, *experience.response.token_ids]
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([token_ids])).logits[0].double()
        for k, token_id in enumerate(experience.response.token_ids):
            if not experience.response.loss_mask[k]:
                continue
            row = logits[len(experience.prompt_token_ids) + k - 1] / temperature
            policy = row[token_id].item() - math.log(sum(math.exp(logit) for logit in row.tolist()))
            ratio = math.exp(policy - experience.response.logprobs[k])
            loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            total += min(loss, 3 * abs(advantage)) if advantage < 0 else loss
            num_tokens += 1
    return total / num_tokens


def gradients(trainer: Trainer, experiences: list[Experience]) -> list[torch.Tensor]:
    trainer.model.zero_grad()
    trainer.accumulate_gradient(prepare(experiences, trainer.config, trainer.version))
    return [parameter.grad.clone() for parameter in trainer.model.parameters()]


def relative_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    difference = sum((a - b).square().sum() for a, b in zip(some, others, strict=True))
    return (difference / sum(b.square().sum() for b in others)).sqrt().item()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


# ------------------------------------------------------------------------------------------------ law 5: the ratio


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_on_fresh_data_the_ratio_is_1(any_model_path, make_config, sample, temperature):
    trainer = Trainer(make_config(any_model_path, temperature=temperature, micro_batch_tokens_max=200))
    metrics = trainer.train_mini_batch(1, 0, sample(trainer.model, 4, temperature=temperature))
    assert metrics["actor/forwarded_token_ratio"] == 1
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_on_stale_data_the_ratio_is_policy_over_behaviour(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path, learning_rate=5e-3))
    behaviour = copy.deepcopy(trainer.model)
    for step in (1, 2):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step))
    stale = sample(behaviour, 4, seed=9)
    trainer.version = 2
    log_ratios = []
    for experience in stale:
        token_ids = torch.tensor([[*experience.prompt_token_ids, *experience.response.token_ids]])
        targets = torch.tensor(experience.response.token_ids)[:, None]
        first = len(experience.prompt_token_ids) - 1
        with torch.no_grad():
            policy, sampler = (
                model(input_ids=token_ids).logits[0, first:-1].log_softmax(-1).gather(1, targets)[:, 0]
                for model in (trainer.model, behaviour)
            )
        log_ratios.append(policy - sampler)
    ratio = torch.cat(log_ratios).exp()
    metrics = trainer.train_mini_batch(3, 0, stale)
    assert ratio.max() > 1.1  # else this shows nothing
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(ratio.max().item(), rel=1e-3)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(ratio.min().item(), rel=1e-3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-3)
    assert metrics["actor/ppo_kl"] == pytest.approx(-ratio.log().mean().item(), rel=1e-3)


# ------------------------------------------------------------------------------------- the loss, and law 6: the split


@pytest.fixture
def stale_batch(qwen2_path, make_config, sample):
    """A trainer two updates away from what sampled its batch: clipped tokens, one group of zeros, a masked stretch."""
    trainer = Trainer(make_config(qwen2_path, temperature=0.8, learning_rate=5e-3))
    behaviour = copy.deepcopy(trainer.model)
    for step in (1, 2):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step, temperature=0.8))
    experiences = sample(behaviour, 4, seed=9, temperature=0.8)
    experiences = [with_score(e, 1.0) if e.group == 101 else e for e in experiences]
    longest = max(experiences, key=lambda e: len(e.response.token_ids))
    longest.response.loss_mask[3:6] = [0, 0, 0]
    longest.response.logprobs[3:6] = [0.0, 0.0, 0.0]
    return trainer, experiences


def test_loss_equals_a_naive_loop(stale_batch):
    trainer, experiences = stale_batch
    expected = naive_loss(trainer, experiences, 0.8)
    metrics = trainer.train_mini_batch(3, 0, experiences)
    assert metrics["actor/pg_clipfrac"] > 0.01
    assert metrics["actor/pg_clipfrac_lower"] > 0.001
    assert metrics["actor/forwarded_token_ratio"] < 0.9
    assert metrics["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 80, 320, 10**6])
def test_gradient_does_not_depend_on_the_micro_batches_or_the_order(stale_batch, make_config, qwen2_path, budget):
    trainer, experiences = stale_batch
    whole = gradients(trainer, experiences)
    other = Trainer(make_config(qwen2_path, temperature=0.8, micro_batch_tokens_max=budget))
    other.model.load_state_dict(trainer.model.state_dict())
    assert relative_difference(gradients(other, experiences), whole) < 1e-5
    assert relative_difference(gradients(other, experiences[::-1]), whole) < 1e-5


def test_the_stop_token_is_trained_though_it_is_the_padding(make_model, make_config, sample):
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    plain = make_model(Qwen2Config(**shape, **heads, tie_word_embeddings=True))
    shared = make_model(Qwen2Config(**shape, **heads, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0))
    trainers = [Trainer(make_config(path, micro_batch_tokens_max=10**6)) for path in (plain, shared)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    experiences = sample(trainers[0].model, 4)
    for experience in experiences:
        experience.response.token_ids[-1] = 0
        experience.response.token_ids[0] = 0  # a turn that ended: it is also an input
    expected = naive_loss(trainers[1], experiences, 1.0)
    assert relative_difference(gradients(trainers[1], experiences), gradients(trainers[0], experiences)) < 1e-6
    assert trainers[1].train_mini_batch(1, 0, experiences)["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


def test_zero_advantage_counts_in_the_mean(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path))
    experiences = sample(trainer.model, 2)
    solved = [with_score(e, 1.0) if e.group == 101 else e for e in experiences]
    alone = gradients(trainer, solved[:4])
    together = gradients(trainer, solved)
    share = sum(map(num_trained_tokens, solved[:4])) / sum(map(num_trained_tokens, solved))
    assert relative_difference(together, [share * gradient for gradient in alone]) < 1e-5


def test_a_group_with_a_missing_member_trains(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path))
    experiences = sample(trainer.model, 2)[1:]
    expected = naive_loss(trainer, experiences, 1.0)
    assert trainer.train_mini_batch(1, 0, experiences)["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


# -------------------------------------------------------------------------------------------------- what is not trained


def test_without_any_advantage_nothing_changes(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path, weight_decay=0.1))
    trainer.train_mini_batch(1, 0, sample(trainer.model, 2))
    before = weights_of(trainer)
    metrics = trainer.train_mini_batch(1, 1, [with_score(e, 1.0) for e in sample(trainer.model, 2)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["frac_reward_zero_std"] == 1
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == metrics["actor/num_updates_skipped"] == 0


@pytest.mark.parametrize("spoilt", ["reward", "behaviour log-prob"])
def test_a_loss_that_is_not_finite_is_skipped_and_counted(qwen2_path, make_config, sample, spoilt):
    trainer = Trainer(make_config(qwen2_path))
    experiences = sample(trainer.model, 2)
    before = weights_of(trainer)
    if spoilt == "reward":
        bad = [with_score(experiences[0], math.nan), *experiences[1:]]
    else:
        bad = copy.deepcopy(experiences)
        bad[0].response.logprobs[0] = -math.inf
    metrics = trainer.train_mini_batch(1, 0, bad)
    assert metrics["actor/num_updates_skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())

    assert trainer.train_mini_batch(1, 1, experiences)["actor/num_updates_skipped"] == 0
    fresh = Trainer(make_config(qwen2_path))
    fresh.train_mini_batch(1, 0, experiences)
    assert all(torch.equal(tensor, weights_of(fresh)[name]) for name, tensor in trainer.weights())


def test_an_empty_response_is_no_error(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path))
    experiences = sample(trainer.model, 2)
    experiences[0] = msgspec.structs.replace(experiences[0], response=Response())
    assert math.isfinite(trainer.train_mini_batch(1, 0, experiences)["actor/pg_loss"])


# ------------------------------------------------------------------------------------------------------------- metrics


def test_staleness_is_the_trainers_version_minus_the_trajectorys(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path))
    trainer.version = 7
    groups = sample(trainer.model, 4)
    versions = {100: 7, 101: 6, 102: 3, 103: 0}
    metrics = trainer.train_mini_batch(1, 0, [msgspec.structs.replace(e, version=versions[e.group]) for e in groups])
    for name in ("actor/pg_clipfrac", "rollout_corr/k3_kl"):
        seen = {key.removeprefix(f"{name}/") for key in metrics if key.startswith(f"{name}/")}
        assert seen == {"staleness_0", "staleness_1", "staleness_4_or_more"}


def test_clip_fractions_by_staleness_add_up(stale_batch):
    trainer, experiences = stale_batch
    trainer.version = 2
    metrics = trainer.train_mini_batch(3, 0, [msgspec.structs.replace(e, version=e.group % 2) for e in experiences])
    by_bucket = {0: metrics["actor/pg_clipfrac/staleness_2"], 1: metrics["actor/pg_clipfrac/staleness_1"]}
    tokens = {parity: sum(num_trained_tokens(e) for e in experiences if e.group % 2 == parity) for parity in (0, 1)}
    total = sum(by_bucket[parity] * tokens[parity] for parity in (0, 1)) / sum(tokens.values())
    assert metrics["actor/pg_clipfrac"] == pytest.approx(total)


def test_lengths_rewards_and_the_learning_rate_are_reported(qwen2_path, make_config, sample):
    trainer = Trainer(make_config(qwen2_path, learning_rate=1e-3, num_warmup_updates=4))
    experiences = sample(trainer.model, 2)
    experiences[0] = msgspec.structs.replace(experiences[0], truncated=True)
    lengths = [len(e.response.token_ids) for e in experiences]
    metrics = trainer.train_mini_batch(1, 0, experiences)
    assert metrics["response_length/mean"] == pytest.approx(statistics.mean(lengths))
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (max(lengths), min(lengths))
    assert metrics["response_length/clip_ratio"] == 1 / 8
    assert metrics["critic/rewards/mean"] == statistics.mean(e.score for e in experiences)
    assert metrics["prompt_length/max"] == 8
    assert metrics["actor/lr"] == pytest.approx(0.25e-3)
    assert trainer.train_mini_batch(1, 1, experiences)["actor/lr"] == pytest.approx(0.5e-3)


# ---------------------------------------------------------------------------------------------- weights, probe, models


def test_weights_have_their_hugging_face_names_and_tied_ones_come_once(any_model_path, make_config):
    trainer = Trainer(make_config(any_model_path))
    names = [name for name, _ in trainer.weights()]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is (not trainer.model.config.tie_word_embeddings)
    reference = AutoModelForCausalLM.from_pretrained(any_model_path, dtype=torch.float32)
    assert set(reference.state_dict()) - {"lm_head.weight"} == set(names) - {"lm_head.weight"}
    assert all(torch.equal(reference.state_dict()[name], tensor) for name, tensor in trainer.weights())


def test_the_probe_is_of_these_weights_and_changes_with_them(any_model_path, make_config, sample):
    trainer = Trainer(make_config(any_model_path))
    probe = trainer.probe()
    reference = AutoModelForCausalLM.from_pretrained(any_model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = reference(input_ids=torch.tensor([probe.token_ids])).logits[0].log_softmax(-1)
    expected = [logprobs[k, token_id].item() for k, token_id in enumerate(probe.token_ids[1:])]
    assert probe.logprobs == pytest.approx(expected, abs=1e-5)
    assert trainer.probe() == probe
    trainer.train_mini_batch(1, 0, sample(trainer.model, 4))
    later = trainer.probe()
    assert later.token_ids == probe.token_ids
    assert max(abs(a - b) for a, b in zip(later.logprobs, probe.logprobs, strict=True)) > probe.tolerance


def test_a_model_of_another_kind_is_refused_by_name(tmp_path, make_config):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"'gpt2'; Laminar trains qwen2, qwen3, llama"):
        Trainer(make_config(tmp_path))
    with pytest.raises(ValueError, match=r"has no config.json"):
        Trainer(make_config(Path("nowhere")))
