"""Law 1 under partial_rollout: an interrupted trajectory goes on from its tokens, and each token keeps its version."""

from functools import partial

from laminar.control.messages import Loaded, LoadFailed, ReplicaReport
from tests.rollout.controller_end import ENVIRONMENTS, Replica, ids_of
from tests.rollout.trainer_end import LOGPROB_ERROR_MAX, TrainerEnd


async def test_each_token_of_an_interrupted_trajectory_replays_under_the_version_it_claims(make_controller):
    controller = make_controller()
    end = TrainerEnd(controller.config)
    first = end.publish_complete()
    try:
        async with Replica(0, controller, end.lease) as replica:
            await replica.load(first)
            replica.generate(batch := controller.dispatch(12))
            for _ in range(3):
                num_events = len(replica.events)
                await replica.reach("some progress", partial(_some_progress, replica, num_events))
                assert isinstance(await replica.load(end.publish_complete(), interrupt=True), Loaded)
            await replica.finish(batch)
        experiences = controller.experiences(ids_of(batch))
        spans = [sorted(set(e.response.versions)) for e in experiences]
        assert max(map(len, spans)) >= 2, "nothing was interrupted in the middle, so this shows nothing"
        assert all(e.version == span[0] for e, span in zip(experiences, spans, strict=True))
        assert all(e.response.versions == sorted(e.response.versions) for e in experiences)
        assert max(map(end.replay_error_by_segment, experiences)) < LOGPROB_ERROR_MAX
        longest = max(experiences, key=lambda e: len(set(e.response.versions)))
        assert end.replay_error(longest) > 100 * LOGPROB_ERROR_MAX, "one version would explain it as well"
    finally:
        end.close()


async def test_when_the_relay_cannot_give_the_version_all_go_on_under_the_old_one(make_controller):
    controller = make_controller()
    end = TrainerEnd(controller.config)
    first = end.publish_complete()
    try:
        async with Replica(0, controller, end.lease) as replica:
            await replica.load(first)
            replica.generate(batch := controller.dispatch(6))
            await replica.reach("some progress", lambda: _some_progress(replica, 0))
            outcome = await replica.load(first + 7, interrupt=True)
            assert isinstance(outcome, LoadFailed)
            assert outcome.serves_on
            await replica.finish(batch)
        experiences = controller.experiences(ids_of(batch))
        assert {version for e in experiences for version in e.response.versions} == {first}
        assert max(map(end.replay_error, experiences)) < LOGPROB_ERROR_MAX
    finally:
        end.close()


async def test_one_that_waits_for_its_environment_goes_on_with_the_answer_under_the_new_version(
    make_controller, tmp_path
):
    gate = tmp_path / "gate"
    controller = make_controller(environment=f"{ENVIRONMENTS}:Gated", extra_info={"gate": str(gate)})
    end = TrainerEnd(controller.config)
    first = end.publish_complete()
    try:
        async with Replica(0, controller, end.lease) as replica:
            await replica.load(first)
            replica.generate(batch := controller.dispatch(4))
            await replica.reach("the environment is asked", lambda: len(replica.waiting()) >= 1)
            asked = sorted(replica.waiting())
            second = end.publish_complete()
            gate.touch()  # Answers may come before, while and after the weights load.
            await replica.load(second, interrupt=True)
            await replica.finish(batch)
        for experience in controller.experiences(asked):
            assert set(experience.response.versions) == {first, second}
            assert end.replay_error_by_segment(experience) < LOGPROB_ERROR_MAX
    finally:
        end.close()


def _some_progress(replica: Replica, num_events: int) -> bool:
    """Whether a report since then says that something was decoded and goes on."""
    return any(isinstance(event, ReplicaReport) and event.progress for event in replica.events[num_events:])
