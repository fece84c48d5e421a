"""What is trained on is what was sampled, also over turns and moves: laws 4 and 5, with real workers and relays."""

from typing import Any

import pytest

from laminar.control.messages import Assignment, Loaded, Released, TrajectoryId
from laminar.data.tokens import text_decoder, text_encoder
from laminar.rollout.engines.embedded import EmbeddedEngine
from tests.rollout.controller_end import ENVIRONMENTS, TWO_TURN, WARM, Replica, ids_of, worker_around
from tests.rollout.trainer_end import LOGPROB_ERROR_MAX, TrainerEnd
from tests.rollout.waiting import reach

PACED = {"accelerator": "h800-qwen2.5-32b-tp4", "time_scale": 2.0}
"""A step takes at least 35 ms."""


# ------------------------------------------------------------------------------------------ law 4: token continuity


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[TrajectoryId, list[int]]:
    """Every id that the engine sampled, by trajectory, taken down where it leaves the sampler."""
    taken: dict[TrajectoryId, list[int]] = {}
    extend = EmbeddedEngine._extend

    def take_down(self: EmbeddedEngine, sequence: Any, token: int, logprob: float) -> Any:
        taken.setdefault(sequence.request.id, []).append(token)
        return extend(self, sequence, token, logprob)

    monkeypatch.setattr(EmbeddedEngine, "_extend", take_down)
    return taken


async def test_the_ids_trained_on_are_the_ids_sampled(published, make_controller, sampled):
    """At this temperature the model writes what no tokenizer would, so text can have had no part in it."""
    controller = make_controller(temperature=3.0)
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(1)
        batch = controller.dispatch(24)
        replica.generate(batch)
        await replica.finish(batch)
    experiences = controller.experiences(ids_of(batch))
    assert {e.trajectory: e.response.token_ids for e in experiences} == sampled
    assert not any(0 in e.response.loss_mask for e in experiences)
    decode, encode = text_decoder(WARM, skip_special_tokens=False), text_encoder(WARM)
    assert sum(encode(decode(e.response.token_ids)) != e.response.token_ids for e in experiences) > 4


@pytest.mark.parametrize(
    ("environment", "turn_end"), [(f"{ENVIRONMENTS}:FirstLine", "\n"), (f"{TWO_TURN}:AsyncTwoTurn", "<|im_end|>")]
)
async def test_two_turns_train_on_what_was_sampled_and_mask_what_was_observed(
    published, make_controller, sampled, environment, turn_end
):
    controller = make_controller(environment=environment)
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(1)
        batch = controller.dispatch(8)
        replica.generate(batch)
        await replica.finish(batch)
    encode = text_encoder(WARM)
    num_turns_ended = 0
    for experience in controller.experiences(ids_of(batch)):
        response = experience.response
        own = [id for id, mask in zip(response.token_ids, response.loss_mask, strict=True) if mask]
        assert own == sampled[experience.trajectory]
        assert published.replay_error(experience) < LOGPROB_ERROR_MAX
        if 0 in response.loss_mask:
            num_turns_ended += 1
            observed = [k for k, mask in enumerate(response.loss_mask) if not mask]
            prompt = experience.trajectory // 4
            assert [response.token_ids[k] for k in observed] == encode(f"<output>{prompt}</output>")
            assert [response.logprobs[k] for k in observed] == [0.0] * len(observed)
            assert response.token_ids[observed[0] - 1] in encode(f"{turn_end}<|im_end|>")
            assert observed == list(range(observed[0], observed[-1] + 1))
    assert num_turns_ended >= 4, "hardly any trajectory had a second turn"


@pytest.mark.parametrize("move_kv", [False, True], ids=["prefilled", "with its cache"])
@pytest.mark.parametrize("moment", ["queued", "first turn", "asked", "second turn"])
async def test_a_move_in_mid_episode_gives_what_the_uninterrupted_run_gives(
    published, make_controller, tmp_path, moment, move_kv
):
    gates = [tmp_path / "open", tmp_path / "shut until moved"]
    gates[0].touch()
    environment, slowly = f"{ENVIRONMENTS}:Gated", {"accelerator": PACED["accelerator"], "time_scale": 0.1}
    whole, moved = (
        make_controller(
            environment=environment, extra_info={"gate": str(gate)}, num_slots=4, paced=paced, move_kv=move_kv
        )
        for gate, paced in zip(gates, (None, slowly), strict=True)
    )
    async with Replica(0, whole, published.lease) as replica:
        await replica.load(1)
        batch = whole.dispatch(8)
        replica.generate(batch)
        await replica.finish(batch)
    async with Replica(0, moved, published.lease) as source, Replica(1, moved, published.lease) as target:
        await source.load(1)
        await target.load(1)
        batch = moved.dispatch(8)  # more than there are slots, so the last are queued at first
        if moment == "second turn":
            gates[1].touch()
        source.generate(batch)
        await source.reach(f"the moment {moment!r}", lambda: _is_moment(moment, source, batch))
        released = await source.release(batch)
        gates[1].touch()
        _check_released(moment, released, source, batch)
        target.generate(again := moved.moved(released.progress))
        await target.finish(again)
        # One whose turn ended in the very step stays where it was.
        await source.finish([a for a in batch if a.trajectory not in ids_of(again)])
    for one, other in zip(whole.experiences(ids_of(batch)), moved.experiences(ids_of(batch)), strict=True):
        assert other.response.token_ids == one.response.token_ids
        assert other.response.loss_mask == one.response.loss_mask
        assert other.response.logprobs == pytest.approx(one.response.logprobs, abs=LOGPROB_ERROR_MAX)
        assert other.truncated == one.truncated


def _is_moment(moment: str, source: Replica, batch: list[Assignment]) -> bool:
    unfinished = [source.controller.token_ids(a.trajectory) for a in batch if a.trajectory not in source.finished]
    match moment:
        case "asked":
            return bool(source.waiting())
        case "second turn":
            (output_end,) = text_encoder(WARM)("</output>")
            return any(output_end in token_ids[:-4] for token_ids in unfinished)
        case _:
            return max(map(len, unfinished)) >= 3


def _check_released(moment: str, released: Released, source: Replica, batch: list[Assignment]) -> None:
    stopped = {p.trajectory: p for p in released.progress}
    assert not set(stopped) & set(source.finished)
    match moment:
        case "queued":
            assert stopped[batch[-1].trajectory].num_tokens == 0
        case "asked":
            assert any(p.waiting_for_tool for p in released.progress)
        case _:
            assert any(p.num_tokens and not p.waiting_for_tool for p in released.progress)


async def test_the_moved_trajectory_s_environment_is_not_heard_any_more(published, make_controller, tmp_path):
    """The call that was under way cannot be ended; what it answers belongs to nobody."""
    gate = tmp_path / "gate"
    controller = make_controller(environment=f"{ENVIRONMENTS}:Gated", extra_info={"gate": str(gate)})
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        batch = controller.dispatch(1)
        replica.generate(batch)
        await replica.reach("the environment is asked", lambda: replica.waiting())
        released = await replica.release(batch)
        assert [p.waiting_for_tool for p in released.progress] == [True]
        gate.touch()
        again = controller.moved(released.progress)
        replica.generate(again)  # back where it was
        await replica.finish(again)
    (experience,) = controller.experiences(ids_of(batch))
    assert experience.response.loss_mask.count(0) == len(text_encoder(WARM)("<output>0</output>"))


@pytest.mark.parametrize("num_steps", range(3, 7))
async def test_one_that_ends_as_it_is_released_stays_and_is_reported_finished(published, make_controller, num_steps):
    """A paced engine holds a step's tokens back: the last one of a response may be sampled and not delivered yet."""
    controller = make_controller(response_tokens_max=4, paced=PACED, report_interval_s=0.001)
    engine = EmbeddedEngine(controller.config.engine, WARM, stop_token_ids=())
    async with Replica(
        0, controller, published.lease, worker=worker_around(engine, controller, published.lease)
    ) as replica:
        await replica.load(0)
        batch = controller.dispatch(3)
        for num_steps_before, assignment in enumerate(batch):
            await _computed(engine, num_steps_before)
            replica.generate([assignment])
        await _computed(engine, num_steps)
        released = await replica.release(batch)
        assert all(progress.num_tokens < 4 for progress in released.progress), "a whole one is to be moved"
        stopped = {progress.trajectory for progress in released.progress}
        assert len(stopped) <= 6 - num_steps, "the first ends in step 4, each other in the one after"
        await replica.finish([a for a in batch if a.trajectory not in stopped])
        # Nothing lives any more, so a load is possible at once, whatever the engine holds back.
        assert isinstance(await replica.load(1), Loaded)
        await published.check_serves(replica, 1)
    assert not replica.failed


async def _computed(engine: EmbeddedEngine, num_steps: int) -> None:
    await reach(f"step {num_steps} is computed", lambda: engine.stats().num_steps >= num_steps)


# --------------------------------------------------------------------------------------------- law 5: the ratio is 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_the_trainer_finds_ratio_1_on_what_a_worker_sampled_from_its_weights(make_controller, temperature):
    controller = make_controller(temperature=temperature, environment=f"{ENVIRONMENTS}:FirstLine")
    end = TrainerEnd(controller.config)
    try:
        version = end.publish_complete()
        async with Replica(0, controller, end.lease) as replica:
            await replica.load(version)
            batch = controller.dispatch(16)
            replica.generate(batch)
            await replica.finish(batch)
        metrics = end.train(controller.experiences(ids_of(batch)))
    finally:
        end.close()
    assert metrics["actor/forwarded_token_ratio"] == 1
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=LOGPROB_ERROR_MAX)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(1, abs=LOGPROB_ERROR_MAX)
    assert metrics["actor/pg_clipfrac"] == 0
