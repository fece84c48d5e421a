"""Law 6 over ranks: two processes that train together do what one does alone, whoever has how much to do."""

import copy

import msgspec
import pytest
import torch

from laminar.train.ranks import ALONE
from laminar.train.sharded_state import read_state
from laminar.train.split import plan_for_rank, split_over_ranks
from laminar.train.trainer import Trainer
from tests.train.rank_processes import RankFailed, on_ranks
from tests.train.rank_work import gradients_of, outcome, restored, train_steps

pytestmark = pytest.mark.timeout(400)

LOSSES = ("grpo", "decoupled_ppo", "tis", "cispo", "gspo", "dr_grpo")


def with_scores(experiences, scores):
    return [msgspec.structs.replace(e, score=score) for e, score in zip(experiences, scores, strict=True)]


def relative_difference(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


# ------------------------------------------------------------------------------------------------------- the split


def test_ranks_get_about_equally_many_tokens_and_every_trajectory_once():
    lengths = [3, 500, 7, 100, 100, 90, 1, 250, 40]
    shares = split_over_ranks(lengths, 3)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) == 500
    assert min(loads) > 250
    assert split_over_ranks(lengths, 1) == [list(range(len(lengths)))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [[], [5], [400, 1, 1, 1, 1, 1], list(range(1, 30))], ids=len)
def test_all_ranks_make_the_same_number_of_micro_batches(num_ranks, lengths):
    plans = [plan_for_rank(lengths, rank, num_ranks, 60) for rank in range(num_ranks)]
    assert len({len(plan) for plan in plans}) == 1
    planned = sorted(index for plan in plans for micro_batch in plan for index in micro_batch)
    assert planned == list(range(len(lengths)))
    assert any(all(plan) for plan in plans), "a micro-batch that nobody needs"


# ------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def begun(qwen2_path, make_config, sample, tmp_path_factory):
    """A checkpoint some updates away from what sampled the batch, so that tokens are clipped; skewed lengths."""
    folder = tmp_path_factory.mktemp("begun")
    trainer = Trainer(make_config(qwen2_path, learning_rate=5e-3))
    behaviour = copy.deepcopy(trainer.model)
    for step in (1, 2):
        trainer.train_mini_batch(step, 0, sample(trainer.model, 4, seed=step))
    trainer.save(folder)
    experiences = sample(behaviour, 4, seed=9)
    # One response is longer than most others together: its rank makes fewer, larger micro-batches.
    short = [e if i % 4 == 0 else cut(e, 1 + i % 3) for i, e in enumerate(experiences)]
    return folder, short


def cut(experience, num_tokens):
    response = experience.response
    return msgspec.structs.replace(
        experience,
        response=msgspec.structs.replace(
            response,
            token_ids=response.token_ids[:num_tokens],
            logprobs=response.logprobs[:num_tokens],
            loss_mask=response.loss_mask[:num_tokens],
            versions=response.versions[:num_tokens],
        ),
    )


def test_the_gradient_of_two_ranks_is_that_of_one(qwen2_path, make_config, begun):
    folder, experiences = begun
    one_useful = [msgspec.structs.replace(e, score=1.0) for e in experiences]
    one_useful[0] = msgspec.structs.replace(one_useful[0], score=0.0)
    filtered = {"overlong": {"filtered": True}}
    only_one_trains = [msgspec.structs.replace(e, truncated=i != 0) for i, e in enumerate(one_useful)]
    nothing = with_scores(experiences, [1.0] * len(experiences))

    def config(num_ranks, **trainer):
        return make_config(qwen2_path, num_ranks=num_ranks, **trainer)

    settings = [
        *(({"loss": {"kind": kind}, "micro_batch_tokens_max": 60}, experiences) for kind in LOSSES),
        *(({"micro_batch_tokens_max": budget}, experiences) for budget in (1, 2 * 40, 8 * 40, 10**6)),
        ({"kl_coefficient": 0.3, "micro_batch_tokens_max": 60}, experiences),
        ({"activation_checkpointing": True, "micro_batch_tokens_max": 60}, experiences),
        ({"micro_batch_tokens_max": 1}, one_useful),
        (filtered, only_one_trains),
        ({}, nothing),
    ]
    two = on_ranks(config(2), gradients_of, [(config(2, **s), folder, batch) for s, batch in settings])
    one = gradients_of(ALONE, [(config(1, **s), folder, batch) for s, batch in settings])
    for (chosen, _), expected, *got in zip(settings, one, *two, strict=True):
        if expected is None:
            assert got == [None, None]
            continue
        assert torch.equal(*got), "both ranks hold rows of one gradient"
        assert relative_difference(got[0], expected) < 1e-5, chosen


def test_two_ranks_train_as_one_and_each_loads_the_other_s_checkpoint(qwen2_path, make_config, sample, tmp_path):
    one, two = (make_config(qwen2_path, num_ranks=n, weight_decay=0.1) for n in (1, 2))
    trainer = Trainer(one)
    steps = [sample(trainer.model, 4, seed=seed) for seed in (1, 2)]
    more = sample(trainer.model, 4, seed=3)
    saved = {n: tmp_path / f"by_{n}" for n in (1, 2)}
    for folder in saved.values():
        folder.mkdir()

    alone = train_steps(ALONE, one, steps, saved[1])
    first, second = on_ranks(two, train_steps, two, steps, saved[2])
    assert second["metrics"] == [{}, {}], "rank 0 speaks for all"
    for metrics, expected in zip(first["metrics"], alone["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert first["probe"] == second["probe"]
    assert first["probe"].logprobs == pytest.approx(alone["probe"].logprobs, abs=1e-4)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, atol=1e-5, rtol=1e-4)

    resumed_alone = restored(ALONE, one, saved[2], more)
    resumed_by_two, _ = on_ranks(two, restored, two, saved[1], more)
    again_by_two, _ = on_ranks(two, restored, two, saved[2], more)
    assert_equal(resumed_alone[0]["state"], first["state"])
    assert_equal(resumed_by_two[0]["state"], alone["state"])
    assert_equal(again_by_two[0]["state"], first["state"])
    for name, weight in resumed_alone[1]["weights"].items():
        torch.testing.assert_close(again_by_two[1]["weights"][name], weight, atol=1e-5, rtol=1e-4)


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


def test_bfloat16_is_for_the_passes_and_float32_for_what_is_kept(qwen2_path, make_config, begun, tmp_path):
    folder, experiences = begun
    full = make_config(qwen2_path, num_ranks=1)
    half = make_config(qwen2_path, num_ranks=1, compute_dtype="bfloat16")
    (got,) = on_ranks(half, gradients_of, [(half, folder, experiences)])
    (expected,) = gradients_of(ALONE, [(full, folder, experiences)])
    assert got[0].dtype == torch.float32
    assert 1e-4 < relative_difference(got[0], expected) < 0.3
    (trained,) = on_ranks(half, train_steps, half, [experiences], tmp_path)
    assert trained["dtypes"] == {torch.float32}
    assert trained["probe"].tolerance == 5e-2


def test_a_rank_that_the_others_never_join_says_so_in_time(qwen2_path, make_config):
    config = make_config(qwen2_path, num_ranks=2)
    with pytest.raises(RankFailed, match=r"TimeoutError: rank 0 of 2 waited 3 s at 127.0.0.1:\d+ for the others"):
        on_ranks(config, outcome, num_missing=1, start_deadline_s=3.0)


def test_a_checkpoint_that_was_damaged_is_refused_by_the_tensor_s_name(qwen2_path, make_config, tmp_path):
    trainer = Trainer(make_config(qwen2_path))
    trainer.save(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    spoilt = bytearray(file.read_bytes())
    embedding = dict(trainer.weights())["model.embed_tokens.weight"].numpy().tobytes()
    spoilt[spoilt.index(embedding) + 40] ^= 1
    file.write_bytes(spoilt)
    with pytest.raises(ValueError, match=r"weight.model.embed_tokens.weight is not what was written there"):
        Trainer(make_config(qwen2_path)).restore(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be read: rank 0: .*no_such_tensor"):
        read_state(tmp_path, {"no_such_tensor": torch.zeros(1)}, ALONE)


def test_ranks_of_one_are_the_identity():
    values = torch.arange(3.0)
    assert ALONE.sum(values) is values
    assert ALONE.gather_on_first(values) is values
    assert ALONE.is_first
