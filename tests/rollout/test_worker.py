"""A worker, its engine, a relay and a publisher, all real: what leaves a replica is what its weights sampled."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from laminar.control.messages import (
    Assignment,
    CommandId,
    Loaded,
    LoadFailed,
    MachineId,
    Progress,
    Released,
    ReplicaId,
    ReplicaReport,
    TrajectoryId,
)
from laminar.data.records import Experience
from laminar.data.tokens import text_decoder, text_encoder
from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.weights import Weights
from laminar.rollout.episode import EpisodeRules
from laminar.rollout.worker import RolloutWorker
from tests.rollout.controller_end import (
    ENVIRONMENTS,
    TEMPERATURE,
    TWO_TURN,
    WARM,
    Controller,
    Replica,
    make_config,
    make_prompts,
)
from tests.rollout.trainer_end import TrainerEnd
from tests.rollout.waiting import reach

LOGPROB_ERROR_MAX = 1e-4
PUBLISH_INTERVAL_S = 0.05
PACED = {"accelerator": "h800-qwen2.5-32b-tp4", "time_scale": 2.0}
"""A step takes at least 35 ms."""
MakeController = Callable[..., Controller]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def published() -> Iterator[TrainerEnd]:
    """A relay that holds versions 0 and 1, and their weights."""
    end = TrainerEnd(make_config())
    end.publish_complete()
    end.publish_complete()
    yield end
    end.close()


@pytest.fixture
def make_controller(tmp_path: Path) -> Iterator[MakeController]:
    made: list[Controller] = []

    def make(*, extra_info: dict[str, Any] | None = None, **config: Any) -> Controller:
        folder = tmp_path / f"controller-{len(made)}"
        made.append(Controller(make_config(**config), folder, make_prompts(extra_info)))
        return made[-1]

    yield make
    for controller in made:
        controller.payload.close()


def replay_error(end: TrainerEnd, experience: Experience) -> float:
    """Largest difference between the recorded log-probs and those under the weights of the version claimed."""
    response = experience.response
    expected = end.logprobs(experience.version, experience.prompt_token_ids, response.token_ids, TEMPERATURE)
    sampled = torch.tensor(response.loss_mask, dtype=torch.bool)
    return (expected - torch.tensor(response.logprobs))[sampled].abs().max().item()


def ids_of(assignments: list[Assignment]) -> list[TrajectoryId]:
    return [a.trajectory for a in assignments]


# ------------------------------------------------------------------------------------------------ law 1: one version


async def test_while_versions_change_under_two_workers_every_trajectory_is_of_the_one_it_claims(make_controller):
    controller = make_controller()
    end = TrainerEnd(controller.config)
    end.publish_complete()
    try:
        async with Replica(0, controller, end.lease) as first, Replica(1, controller, end.lease) as second:
            publishing = asyncio.create_task(_keep_publishing(end))
            batches = await asyncio.gather(_serve(first, end, batch_size=12), _serve(second, end, batch_size=4))
            publishing.cancel()
        loads = [[e.version for e in r.events if isinstance(e, Loaded)] for r in (first, second)]
        experiences = controller.experiences([id for batch in batches for id in batch])
        assert {len(set(e.response.versions)) for e in experiences} == {1}
        assert {e.version for e in experiences} == {version for loaded in loads for version in loaded}
        errors = [replay_error(end, experience) for experience in experiences]
        assert max(errors) < LOGPROB_ERROR_MAX
        # Else this shows nothing: both refreshed often, not in step, and their versions do differ.
        assert min(map(len, loads)) >= 4
        assert loads[0] != loads[1]
        other = msgspec.structs.replace(experiences[0], version=experiences[0].version + 1)
        assert replay_error(end, other) > 100 * LOGPROB_ERROR_MAX
    finally:
        end.close()


async def _keep_publishing(end: TrainerEnd) -> None:
    while True:
        end.publish()
        await asyncio.sleep(PUBLISH_INTERVAL_S)


async def _serve(replica: Replica, end: TrainerEnd, *, batch_size: int, num_batches: int = 5) -> list[TrajectoryId]:
    """Closed batches, each at the newest version that the relay holds when the last one has ended."""
    done: list[TrajectoryId] = []
    for _ in range(num_batches):
        while not isinstance(outcome := await replica.load(end.complete()[-1]), Loaded):
            assert outcome.serves_on, "newer versions may have pushed it out, nothing else"
        batch = replica.controller.dispatch(batch_size)
        replica.generate(batch)
        await replica.finish(batch)
        assert not replica.failed
        done += ids_of(batch)
    return done


async def test_no_version_is_loaded_while_a_trajectory_lives_even_if_the_engine_is_idle(
    published, make_controller, tmp_path
):
    gate = tmp_path / "gate"
    controller = make_controller(environment=f"{ENVIRONMENTS}:Gated", extra_info={"gate": str(gate)})
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        batch = controller.dispatch(1)
        replica.generate(batch)
        await replica.reach("the environment is asked", lambda: _waiting(replica) == set(ids_of(batch)))
        with pytest.raises(RuntimeError, match=r"version 1 cannot be loaded while 1 trajectories of version 0 live"):
            await replica.worker.load(CommandId(77), 1)
        gate.touch()
        await replica.finish(batch)
    (experience,) = controller.experiences(ids_of(batch))
    assert set(experience.response.versions) == {0}
    assert replay_error(published, experience) < LOGPROB_ERROR_MAX


def _waiting(replica: Replica) -> set[TrajectoryId]:
    """Those whose last report says that they wait for the environment."""
    last: dict[TrajectoryId, bool] = {}
    for event in replica.events:
        for progress in event.progress if isinstance(event, ReplicaReport) else ():
            last[progress.trajectory] = progress.waiting_for_tool
    return {id for id, waiting in last.items() if waiting}


# -------------------------------------------------------------------------------------------------- law 3: delivery


async def test_weights_that_are_not_those_of_the_probe_are_refused_by_name(make_controller):
    """What arrived has the right checksum and is of another policy: only the log-probs can tell."""
    controller = make_controller()
    end = TrainerEnd(controller.config)
    try:
        end.publish_complete()
        end.publish_complete(probe=end.probe())  # of the version before
        async with Replica(0, controller, end.lease) as replica:
            assert isinstance(await replica.load(0), Loaded)
            outcome = await replica.load(1)
        assert isinstance(outcome, LoadFailed)
        assert not outcome.serves_on
        assert "version 1" in outcome.cause
        assert "differs" in outcome.cause
    finally:
        end.close()


async def test_an_engine_that_keeps_an_old_matrix_is_caught_by_the_probe(published, make_controller, monkeypatch):
    """As engines did that kept a packed copy of a tied head: every load looks well and one matrix is stale."""
    controller = make_controller()
    fill, stale = Weights._fill, "model.layers.1.mlp.down_proj.weight"

    def fill_all_but_one(self: Weights, place: Any, tensor: torch.Tensor) -> None:
        if place is not self._places[stale]:
            fill(self, place, tensor)

    async with Replica(0, controller, published.lease) as replica:
        assert isinstance(await replica.load(0), Loaded)
        monkeypatch.setattr(Weights, "_fill", fill_all_but_one)
        outcome = await replica.load(1)
    assert isinstance(outcome, LoadFailed)
    assert not outcome.serves_on
    assert "differs" in outcome.cause


async def test_bytes_that_changed_on_the_relay_are_not_served(published, make_controller):
    """A flipped low bit moves no log-prob far enough for the probe, so the checksum is what sees it."""
    controller = make_controller()

    @contextmanager
    def damaged(version: int) -> Iterator[LeasedVersion]:
        with published.lease(version) as leased:
            data = bytearray(leased.data)
            data[400] ^= version  # version 0 is left as it is
            yield LeasedVersion(leased.manifest, leased.checksum, memoryview(bytes(data)))

    async with Replica(0, controller, damaged) as replica:
        assert isinstance(await replica.load(0), Loaded)
        outcome = await replica.load(1)
        assert isinstance(outcome, LoadFailed)
        assert "version 1" in outcome.cause
        assert "checksum" in outcome.cause
        assert outcome.serves_on, "nothing of it was taken in"
        await _serves(replica, published, version=0)


@pytest.mark.parametrize("why", ["the relay lacks it", "no relay answers"])
async def test_a_version_that_cannot_be_had_leaves_the_old_one_serving(published, make_controller, why):
    controller = make_controller()
    lease = published.lease

    def lease_here(version: int) -> Any:
        return lease(version)

    async with Replica(0, controller, lease_here) as replica:
        await replica.load(1)
        if why == "no relay answers":
            from laminar.relay.lease import lease as lease_of

            lease = partial(_lease_elsewhere, lease_of)
        outcome = await replica.load(99)
        assert isinstance(outcome, LoadFailed)
        assert outcome.serves_on
        assert (outcome.version, outcome.replica) == (99, 0)
        assert ("version 99" if why == "the relay lacks it" else "nobody listens") in outcome.cause
        await _serves(replica, published, version=1)


def _lease_elsewhere(lease_of: Any, version: int) -> Any:
    return lease_of("no-such-run", 0, b"token", version, 0.1)


async def _serves(replica: Replica, end: TrainerEnd, *, version: int) -> None:
    batch = replica.controller.dispatch(2)
    replica.generate(batch)
    await replica.finish(batch)
    for experience in replica.controller.experiences(ids_of(batch)):
        assert experience.version == version
        assert replay_error(end, experience) < LOGPROB_ERROR_MAX


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
        assert replay_error(published, experience) < LOGPROB_ERROR_MAX
        if 0 in response.loss_mask:
            num_turns_ended += 1
            observed = [k for k, mask in enumerate(response.loss_mask) if not mask]
            prompt = experience.trajectory // 4
            assert [response.token_ids[k] for k in observed] == encode(f"<output>{prompt}</output>")
            assert [response.logprobs[k] for k in observed] == [0.0] * len(observed)
            assert response.token_ids[observed[0] - 1] in encode(f"{turn_end}<|im_end|>")
            assert observed == list(range(observed[0], observed[-1] + 1))
    assert num_turns_ended >= 4, "hardly any trajectory had a second turn"


@pytest.mark.parametrize("moment", ["queued", "first turn", "asked", "second turn"])
async def test_a_move_in_mid_episode_gives_what_the_uninterrupted_run_gives(
    published, make_controller, tmp_path, moment
):
    gates = [tmp_path / "open", tmp_path / "shut until moved"]
    gates[0].touch()
    environment, slowly = f"{ENVIRONMENTS}:Gated", {"accelerator": PACED["accelerator"], "time_scale": 0.1}
    whole, moved = (
        make_controller(environment=environment, extra_info={"gate": str(gate)}, num_slots=4, paced=paced)
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
    for one, other in zip(whole.experiences(ids_of(batch)), moved.experiences(ids_of(batch)), strict=True):
        assert other.response.token_ids == one.response.token_ids
        assert other.response.loss_mask == one.response.loss_mask
        assert other.response.logprobs == pytest.approx(one.response.logprobs, abs=LOGPROB_ERROR_MAX)
        assert other.truncated == one.truncated


def _is_moment(moment: str, source: Replica, batch: list[Assignment]) -> bool:
    unfinished = [source.controller.token_ids(a.trajectory) for a in batch if a.trajectory not in source.finished]
    match moment:
        case "asked":
            return bool(_waiting(source))
        case "second turn":
            (output_end,) = text_encoder(WARM)("</output>")
            return any(output_end in token_ids[:-4] for token_ids in unfinished)
        case _:
            return max(map(len, unfinished)) >= 3


def _check_released(moment: str, released: Released, source: Replica, batch: list[Assignment]) -> None:
    stopped = {p.trajectory: p for p in released.progress}
    assert set(stopped) | set(source.finished) == set(ids_of(batch))
    assert not set(stopped) & set(source.finished)
    match moment:
        case "queued":
            assert stopped[batch[-1].trajectory].num_tokens == 0
        case "asked":
            assert any(p.waiting_for_tool for p in released.progress)
        case _:
            assert released.progress


async def test_the_moved_trajectory_s_environment_is_not_heard_any_more(published, make_controller, tmp_path):
    """The call that was under way cannot be ended; what it answers belongs to nobody."""
    gate = tmp_path / "gate"
    controller = make_controller(environment=f"{ENVIRONMENTS}:Gated", extra_info={"gate": str(gate)})
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        batch = controller.dispatch(1)
        replica.generate(batch)
        await replica.reach("the environment is asked", lambda: _waiting(replica))
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
    async with Replica(0, controller, published.lease, worker=_worker(controller, engine, published.lease)) as replica:
        await replica.load(0)
        batch = controller.dispatch(3)
        for num_steps_before, assignment in enumerate(batch):
            await _computed(engine, num_steps_before)
            replica.generate([assignment])
        await _computed(engine, num_steps)
        released = await replica.release(batch)
        assert all(progress.num_tokens < 4 for progress in released.progress), "a whole one is to be moved"
        stopped = {progress.trajectory for progress in released.progress}
        assert len(stopped) == 6 - num_steps, "the first ends in step 4, each other in the one after"
        await replica.finish([a for a in batch if a.trajectory not in stopped])
        # Nothing lives any more, so a load is possible at once, whatever the engine holds back.
        assert isinstance(await replica.load(1), Loaded)
        await _serves(replica, published, version=1)
    assert not replica.failed


async def _computed(engine: EmbeddedEngine, num_steps: int) -> None:
    await reach(f"step {num_steps} is computed", lambda: engine.stats().num_steps >= num_steps)


def _worker(controller: Controller, engine: EmbeddedEngine, lease: Any) -> RolloutWorker:
    rules = EpisodeRules(
        response_tokens_max=controller.config.data.response_tokens_max, stop_token_ids=(), temperature=TEMPERATURE
    )
    return RolloutWorker(
        ReplicaId(0),
        MachineId(0),
        engine,
        lease,
        rules=rules,
        evaluation_rules=rules,
        report_interval_s=controller.config.rollout.report_interval_s,
    )


# ------------------------------------------------------------------------------------------------------- by name


async def test_a_request_that_the_engine_refuses_fails_by_name_and_the_others_go_on(published, make_controller):
    controller = make_controller(response_tokens_max=90, kv_capacity_tokens=128)
    too_long = msgspec.structs.replace(make_prompts()[0], token_ids=tuple(range(10, 60)))
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        tasks = controller.payload.tasks(batch := controller.dispatch(5), evaluation=False)
        tasks[0] = msgspec.structs.replace(tasks[0], prompt=too_long)
        replica.worker.generate(tasks, evaluation=False)
        await replica.finish(batch)
    assert list(replica.failed) == [batch[0].trajectory]
    failed = replica.failed[batch[0].trajectory]
    assert failed.cause.startswith("engine: request 0 may need 50 + 90 = 140 KV tokens")
    assert failed.attempt == 0
    assert set(replica.finished) == set(ids_of(batch[1:]))


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Raises", "environment: Raises.observe raised ZeroDivisionError: the tool is broken"),
        ("Blank", "environment: trajectory 0, attempt 0, turn 1: an observation without tokens"),
        ("HalfCharacter", "environment: '7\\ud800' is not valid Unicode, so it has no tokens"),
    ],
)
async def test_an_environment_that_fails_fails_its_trajectory_by_name(
    published, make_controller, tmp_path, name, cause
):
    model_path = _with_normalizer(tmp_path, {"type": "Replace", "pattern": {"String": " "}, "content": ""})
    controller = make_controller(environment=f"{ENVIRONMENTS}:{name}", model_path=model_path)
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        batch = controller.dispatch(1)
        replica.generate(batch)
        await replica.finish(batch)
    assert replica.failed[batch[0].trajectory].cause == cause


def _with_normalizer(folder: Path, normalizer: dict[str, Any]) -> Path:
    """The tiny model with a tokenizer that changes what it reads."""
    copied = Path(shutil.copytree(WARM, folder / "model"))
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["normalizer"] = normalizer
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copied


# -------------------------------------------------------------------------------------------------------- reports


async def test_an_idle_worker_sends_heartbeats(published, make_controller):
    controller = make_controller(report_interval_s=0.05)
    async with Replica(0, controller, published.lease) as replica:
        loop = asyncio.get_running_loop()
        await replica.reach("the first report", lambda: replica.events)
        began_s, before = loop.time(), len(replica.events)
        await replica.reach("four more", lambda: len(replica.events) >= before + 4)
        took_s = loop.time() - began_s
    empty = ReplicaReport(ReplicaId(0), 0.0, 0, 0, 0)
    assert replica.events == [empty] * len(replica.events)
    assert took_s > 0.12, "it reported faster than asked for"


async def test_the_end_of_a_batch_and_outcomes_of_commands_do_not_wait_for_the_interval(published, make_controller):
    """With an interval longer than any deadline here, only what is urgent comes."""
    controller = make_controller(report_interval_s=1000.0)
    async with Replica(0, controller, published.lease) as replica:
        assert isinstance(await replica.load(0), Loaded)
        batch = controller.dispatch(6)
        replica.generate(batch)
        await replica.finish(batch)
        assert isinstance(await replica.release(batch), Released)
    reports = [e for e in replica.events if isinstance(e, ReplicaReport) and e.finished]
    assert len(reports) == 1, "only the end of the whole batch is urgent"


async def test_what_a_release_speaks_of_is_reported_before_it(published, make_controller):
    controller = make_controller(report_interval_s=1000.0)
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(0)
        batch = controller.dispatch(8)
        replica.generate(batch)
        await _steps(30)
        released = await replica.release([*batch, Assignment(TrajectoryId(999), 0, batch[0].group, batch[0].prompt)])
    assert released.progress, "nothing was left to be released"
    finished = set(replica.finished)
    assert finished | {p.trajectory for p in released.progress} == set(ids_of(batch))
    before = replica.events[replica.events.index(released) - 1]
    assert isinstance(before, ReplicaReport)
    assert set(before.progress) >= {Progress(p.trajectory, 0, p.num_tokens) for p in released.progress if p.num_tokens}


async def _steps(number: int) -> None:
    """Let the worker go on for about so many engine steps: each gives way to the loop once."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_an_engine_that_dies_ends_the_reports_with_its_error(published, make_controller):
    controller = make_controller(report_interval_s=1000.0)
    engine = EmbeddedEngine(controller.config.engine, WARM)
    async with Replica(0, controller, published.lease, worker=_worker(controller, engine, published.lease)) as replica:
        await replica.load(0)
        replica.generate(controller.dispatch(2))
        await engine.close()
        await reach("the reports have ended", replica.listening.done)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            replica.listening.result()
        replica.listening = asyncio.create_task(asyncio.sleep(0))
