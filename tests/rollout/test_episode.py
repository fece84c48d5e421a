import asyncio
import math
from pathlib import Path

import pytest

from laminar.data.partial_pool import PartialResponsePool
from laminar.data.records import Prompt, Task
from laminar.envs.env import load_environment, observe
from laminar.rollout.engines.engine import Delta, Request
from laminar.rollout.episode import Episode, EpisodeRules, EpisodeState

TWO_TURN = Path(__file__).parents[1] / "envs" / "two_turn.py"
EOS, CODE_END = 0, 1
PROMPT = Prompt(4, (50, 51), "sums", "4", {"tool_output": 7})


def rules(**changes) -> EpisodeRules:
    return EpisodeRules(**({"response_tokens_max": 20, "stop_token_ids": (EOS, CODE_END)} | changes))


def task(token_ids=(), loss_mask=None, attempt=0) -> Task:
    mask = (1,) * len(token_ids) if loss_mask is None else loss_mask
    return Task(7, attempt, PROMPT, tuple(token_ids), tuple(mask), seed=11)


def delta(*token_ids, stop=None, request=7, logprobs=None, cause="") -> Delta:
    logprobs = tuple(-float(t) / 100 for t in token_ids) if logprobs is None else logprobs
    return Delta(request, tuple(token_ids), logprobs, stop, cause)


def single(**changes) -> Episode:
    return Episode(task(), rules(**changes), version=3)


def two_turn(**changes) -> Episode:
    return single(num_turns_max=2, **changes)


def only(episode: Episode):
    (report,) = episode.take_unreported()
    return report


# --------------------------------------------------------------------------------------------------- single-turn


def test_a_new_trajectory_is_decoded_from_its_prompt():
    request = Episode(task(), rules(temperature=0.7), 3).request()
    assert request == Request(
        id=7,
        token_ids=(50, 51),
        num_new_tokens_max=20,
        position=0,
        temperature=0.7,
        seed=11,
        stop_token_ids=(EOS, CODE_END),
    )


def test_an_evaluation_passes_its_sampling_on():
    request = single(evaluation=True, top_p=0.9, top_k=5, temperature=0.0).request()
    assert (request.evaluation, request.top_p, request.top_k, request.temperature) == (True, 0.9, 5, 0.0)


def test_a_stop_ends_a_single_turn_and_keeps_the_stop_token():
    """P33: the end of the sequence is trained on, also where pad is the same token; the mask goes by position."""
    episode = single()
    episode.take(delta(60, 61))
    episode.take(delta(EOS, stop="stop"))
    assert episode.state is EpisodeState.FINISHED
    assert (episode.truncated, episode.num_tokens, episode.num_turns) == (False, 3, 1)
    report = only(episode)
    assert report.token_ids == (60, 61, EOS)
    assert report.loss_mask == (1, 1, 1)


def test_an_observation_may_hold_stop_tokens_and_ends_no_turn():
    """P33: chat markup ends messages with the same token; what it is follows from its position, not its id."""
    episode = single(num_turns_max=3)
    episode.take(delta(60, EOS, stop="stop"))
    episode.observe([70, EOS])
    assert (episode.state, episode.num_turns) == (EpisodeState.DECODING, 2)
    report = only(episode)
    assert report.loss_mask == (1, 1, 0, 0)
    moved = Episode(task(report.token_ids, report.loss_mask, attempt=1), rules(num_turns_max=3), version=3)
    assert (moved.state, moved.num_turns) == (EpisodeState.DECODING, 2)


def test_the_length_limit_truncates():
    episode = single(response_tokens_max=2)
    episode.take(delta(60, 61, stop="length"))
    assert episode.state is EpisodeState.FINISHED
    assert episode.truncated


def test_an_error_fails_the_trajectory_by_its_cause():
    episode = single()
    episode.take(delta(stop="error", cause="no KV blocks"))
    assert (episode.state, episode.cause) == (EpisodeState.FAILED, "no KV blocks")


def test_an_interrupted_trajectory_goes_on_from_its_tokens_with_the_rest_of_the_budget():
    episode = single()
    episode.take(delta(60, 61))
    episode.take(delta(62, stop="abort"))
    assert episode.state is EpisodeState.INTERRUPTED
    request = episode.request()
    assert request.token_ids == (50, 51, 60, 61, 62)
    assert (request.position, request.num_new_tokens_max, request.seed) == (3, 17, 11)
    assert episode.state is EpisodeState.DECODING


# ------------------------------------------------------------------------------------------------------- reports


def test_reports_are_what_the_pool_needs_each_token_once():
    episode, pool = single(), PartialResponsePool()
    assert episode.take_unreported() == ()
    episode.take(delta(60))
    episode.take(delta(61, 62))
    first = only(episode)
    episode.take(delta(63, EOS, stop="stop"))
    second = only(episode)
    assert episode.take_unreported() == ()
    assert (first.start, first.token_ids, first.logprobs) == (0, (60, 61, 62), (-0.60, -0.61, -0.62))
    assert (second.start, second.token_ids, second.attempt, second.version) == (3, (63, EOS), 0, 3)
    assert pool.apply(first)
    assert pool.apply(second)
    assert pool.num_tokens(7) == episode.num_tokens


def test_tokens_of_two_versions_are_reported_apart():
    episode = single()
    episode.take(delta(60, 61, stop="abort"))
    episode.change_version(4)
    episode.request()
    episode.take(delta(62))
    before, after = episode.take_unreported()
    assert (before.version, before.start, before.token_ids) == (3, 0, (60, 61))
    assert (after.version, after.start, after.token_ids) == (4, 2, (62,))


# --------------------------------------------------------------------------------------------------------- turns


def test_an_observation_is_appended_masked_and_the_next_turn_asked_for():
    """P40: what was sampled is submitted again id by id, and tool tokens carry no loss."""
    episode = two_turn()
    episode.take(delta(60, CODE_END, stop="stop"))
    assert episode.state is EpisodeState.TURN_ENDED
    assert episode.num_turns == 1
    episode.observe([70, 71])
    assert episode.num_turns == 2
    request = episode.request()
    assert request.token_ids == (50, 51, 60, CODE_END, 70, 71)
    assert (request.position, request.num_new_tokens_max) == (4, 16)
    episode.take(delta(61, EOS, stop="stop"))
    assert episode.state is EpisodeState.FINISHED
    assert episode.num_turns == 2
    report = only(episode)
    assert report.token_ids == (60, CODE_END, 70, 71, 61, EOS)
    assert report.loss_mask == (1, 1, 0, 0, 1, 1)
    assert report.logprobs == (-0.60, -0.01, 0.0, 0.0, -0.61, 0.0)


def test_the_environment_may_end_the_trajectory_early():
    episode = single(num_turns_max=5)
    episode.take(delta(60, EOS, stop="stop"))
    episode.observe(None)
    assert (episode.state, episode.truncated, episode.num_turns) == (EpisodeState.FINISHED, False, 1)


def test_the_last_turn_is_not_answered():
    episode = two_turn()
    episode.take(delta(CODE_END, stop="stop"))
    episode.observe([70])
    episode.take(delta(CODE_END, stop="stop"))
    assert (episode.state, episode.truncated) == (EpisodeState.FINISHED, False)


def test_an_observation_leaves_room_for_the_next_turn_or_the_trajectory_ends():
    for limit in range(2, 8):
        episode = two_turn(response_tokens_max=limit)
        episode.take(delta(60, CODE_END, stop="stop"))
        room = episode.num_observation_tokens_max
        assert room == max(0, limit - 3)
        if room == 0:
            episode.truncate()
            assert (episode.state, episode.truncated, episode.num_tokens) == (EpisodeState.FINISHED, True, 2)
            continue
        episode.observe([70] * room)
        assert episode.request().num_new_tokens_max == 1


def test_an_observation_may_have_a_limit_of_its_own():
    episode = two_turn(observation_tokens_max=3)
    episode.take(delta(CODE_END, stop="stop"))
    assert episode.num_observation_tokens_max == 3
    with pytest.raises(AssertionError, match="4 tokens, 3 fit"):
        episode.observe([70] * 4)


def test_a_turn_that_uses_up_the_budget_may_still_be_the_last_one():
    episode = two_turn(response_tokens_max=2)
    episode.take(delta(60, CODE_END, stop="stop"))
    assert episode.num_observation_tokens_max == 0
    episode.observe(None)
    assert (episode.state, episode.truncated, episode.num_tokens) == (EpisodeState.FINISHED, False, 2)


def test_only_a_turn_that_another_may_follow_is_worth_keeping_kv_for():
    episode = single(num_turns_max=3)
    assert episode.request().may_continue
    episode.take(delta(60, EOS, stop="stop"))
    episode.observe([70])
    assert episode.request().may_continue
    episode.take(delta(61, EOS, stop="stop"))
    episode.observe([70])
    assert not episode.request().may_continue
    assert not single().request().may_continue


def test_an_observation_without_tokens_is_refused():
    episode = two_turn()
    episode.take(delta(CODE_END, stop="stop"))
    with pytest.raises(ValueError, match="trajectory 7, attempt 0, turn 1: an observation without tokens"):
        episode.observe([])


# -------------------------------------------------------------------------------------------------------- resume


def test_a_resumed_trajectory_goes_on_and_reports_only_what_is_new():
    episode = Episode(task([60, 61], attempt=2), rules(), version=3)
    assert episode.request().token_ids == (50, 51, 60, 61)
    assert episode.request().position == 2
    episode.take(delta(62))
    report = only(episode)
    assert (report.attempt, report.start, report.token_ids, report.logprobs) == (2, 2, (62,), (-0.62,))


@pytest.mark.parametrize(
    ("token_ids", "loss_mask", "state", "num_turns"),
    [
        ((), (), EpisodeState.DECODING, 1),
        ((60,), (1,), EpisodeState.DECODING, 1),
        ((60, CODE_END), (1, 1), EpisodeState.TURN_ENDED, 1),
        ((60, CODE_END, 70), (1, 1, 0), EpisodeState.DECODING, 2),
        ((60, CODE_END, 70, EOS), (1, 1, 0, 0), EpisodeState.DECODING, 2),
        ((60, CODE_END, 70, 61), (1, 1, 0, 1), EpisodeState.DECODING, 2),
        ((60, CODE_END, 70, 61, CODE_END), (1, 1, 0, 1, 1), EpisodeState.TURN_ENDED, 2),
        ((CODE_END, 70, CODE_END, 70, EOS), (1, 0, 1, 0, 1), EpisodeState.FINISHED, 3),
    ],
)
def test_a_resumed_trajectory_is_in_the_right_turn(token_ids, loss_mask, state, num_turns):
    episode = Episode(task(token_ids, loss_mask), rules(num_turns_max=3), version=3)
    assert (episode.state, episode.num_turns) == (state, num_turns)
    assert episode.num_tokens == len(token_ids)
    assert episode.take_unreported() == ()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 5])
def test_a_move_changes_nothing_about_the_outcome(num_tokens):
    """Wherever a report may end (an observation is reported whole), tokens, mask and turns come out the same."""
    whole_ids, whole_mask = (60, CODE_END, 70, 71, 61, EOS), (1, 1, 0, 0, 1, 1)
    ids, mask = whole_ids[:num_tokens], whole_mask[:num_tokens]
    episode = Episode(task(ids, mask, attempt=1), rules(num_turns_max=2), version=3)
    while episode.state is not EpisodeState.FINISHED:
        if episode.state is EpisodeState.TURN_ENDED:
            episode.observe([70, 71])
        else:
            request = episode.request()
            assert request.position == episode.num_tokens
            token = whole_ids[request.position]
            episode.take(delta(token, stop="stop" if token in request.stop_token_ids else None))
    new = only(episode)
    assert (*ids, *new.token_ids) == whole_ids
    assert (*mask, *new.loss_mask) == whole_mask
    assert episode.num_turns == 2


def test_a_trajectory_resumed_at_its_limit_is_finished():
    episode = Episode(task([60, 61, 62]), rules(response_tokens_max=3), version=3)
    assert (episode.state, episode.truncated, episode.num_tokens_left) == (EpisodeState.FINISHED, True, 0)


def test_a_resumed_trajectory_needs_a_mask_for_every_token():
    with pytest.raises(ValueError, match="trajectory 7, attempt 0: resumed with 2 tokens and 1 mask entries"):
        Episode(task([60, 61], [1]), rules(), version=3)


# ------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (delta(60, request=8), "position 1: these tokens are of request 8"),
        (delta(60, logprobs=()), "position 1: 1 tokens and 0 log-probs"),
        (delta(60, logprobs=(math.nan,)), "position 1: log-probs that are not finite"),
        (delta(*range(60, 80)), "position 1: 20 tokens where 19 are left"),
        (delta(60, stop="stop"), "position 1: stopped, and the last token is no stop token"),
        (delta(stop="stop"), "position 1: stopped, and the last token is no stop token"),
    ],
)
def test_tokens_that_break_the_contract_are_named(wrong, complaint):
    episode = single()
    episode.take(delta(59))
    with pytest.raises(ValueError, match=f"trajectory 7, attempt 0, {complaint}"):
        episode.take(wrong)
    assert episode.num_tokens == 1


def test_a_finished_trajectory_takes_and_asks_for_nothing():
    episode = single()
    episode.take(delta(EOS, stop="stop"))
    with pytest.raises(AssertionError, match="is finished"):
        episode.take(delta(60))
    with pytest.raises(AssertionError, match="is finished"):
        episode.request()


# ------------------------------------------------------------------------------------------ with an environment


VOCABULARY = ["<eos>", "</code>", "<code>", "2", "+", "22", "<output>", "7", "</output>", "so", "7 7", "4"]


def decode(token_ids):
    return "".join(VOCABULARY[id] for id in token_ids)


def encode(text):
    """Greedy longest match: unlike what a model may sample, "22" is never "2" and "2"."""
    ids = []
    while text:
        word = max((w for w in VOCABULARY if text.startswith(w)), key=len)
        ids.append(VOCABULARY.index(word))
        text = text[len(word) :]
    return ids


@pytest.mark.parametrize("name", ["TwoTurn", "AsyncTwoTurn"])
def test_two_turns_with_an_environment_train_on_the_ids_that_were_sampled(name):
    """P40: the sampled ids do not round-trip through text, and are kept all the same."""
    environment = load_environment(f"{TWO_TURN}:{name}")
    episode = Episode(task(), rules(num_turns_max=3), version=3)
    sampled_first = (2, 3, 3, 4, 3, CODE_END)
    assert encode(decode(sampled_first)) != list(sampled_first)

    async def ask():
        observation = await observe(environment, episode.turn(decode), timeout_s=5)
        episode.observe(encode(observation.text) if observation is not None else None)

    episode.take(delta(*sampled_first, stop="stop"))
    first = episode.turn(decode)
    assert (first.text, first.num_turns, first.ground_truth) == ("<code>22+2</code>", 1, "4")
    asyncio.run(ask())
    assert episode.request().token_ids == (50, 51, *sampled_first, 6, 7, 8)
    episode.take(delta(9, 11, EOS, stop="stop"))
    second = episode.turn(decode)
    assert second.text == "so4<eos>"
    assert second.earlier_turns == ("<code>22+2</code>",)
    assert second.response_text == "<code>22+2</code><output>7</output>so4<eos>"
    asyncio.run(ask())
    assert (episode.state, episode.num_turns) == (EpisodeState.FINISHED, 2)
    report = only(episode)
    assert report.token_ids == (*sampled_first, 6, 7, 8, 9, 11, EOS)
    assert report.loss_mask == (1,) * 6 + (0,) * 3 + (1,) * 3


def test_the_environment_is_asked_the_same_after_a_move():
    before = Episode(task(), rules(num_turns_max=3), version=3)
    before.take(delta(2, 3, CODE_END, stop="stop"))
    report = only(before)
    after = Episode(task(report.token_ids, report.loss_mask, attempt=1), rules(num_turns_max=3), version=3)
    assert after.turn(decode) == before.turn(decode)
    assert after.asked_before
    assert not before.asked_before
