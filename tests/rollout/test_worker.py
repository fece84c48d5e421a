"""A worker, its engine, a relay and a publisher, all real: laws 1 and 3, failures by name, the stream of reports."""

import asyncio
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    Progress,
    Released,
    ReplicaId,
    ReplicaReport,
    TrajectoryId,
)
from laminar.relay.lease import lease as lease_of
from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Delta, EngineDied, Request
from laminar.rollout.engines.weights import Weights
from tests.rollout.controller_end import ENVIRONMENTS, WARM, Replica, ids_of, make_prompts, worker_around
from tests.rollout.trainer_end import LOGPROB_ERROR_MAX, TrainerEnd
from tests.rollout.waiting import reach

PUBLISH_INTERVAL_S = 0.05


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
        errors = [end.replay_error(experience) for experience in experiences]
        assert max(errors) < LOGPROB_ERROR_MAX
        # Else this shows nothing: both refreshed often, and the versions do differ.
        assert min(map(len, loads)) >= 4
        other = msgspec.structs.replace(experiences[0], version=experiences[0].version + 1)
        assert end.replay_error(other) > 100 * LOGPROB_ERROR_MAX
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
        await replica.reach("the environment is asked", lambda: replica.waiting() == set(ids_of(batch)))
        with pytest.raises(RuntimeError, match=r"version 1 cannot be loaded while 1 trajectories of version 0 live"):
            await replica.worker.load(CommandId(77), 1)
        gate.touch()
        await replica.finish(batch)
    (experience,) = controller.experiences(ids_of(batch))
    assert set(experience.response.versions) == {0}
    assert published.replay_error(experience) < LOGPROB_ERROR_MAX


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
        await published.check_serves(replica, 0)


@pytest.mark.parametrize("why", ["the relay lacks it", "no relay answers"])
async def test_a_version_that_cannot_be_had_leaves_the_old_one_serving(published, make_controller, why):
    controller = make_controller()
    lease = published.lease

    def lease_here(version: int) -> Any:
        return lease(version)

    async with Replica(0, controller, lease_here) as replica:
        await replica.load(1)
        if why == "no relay answers":
            lease = _lease_elsewhere
        outcome = await replica.load(99)
        assert isinstance(outcome, LoadFailed)
        assert outcome.serves_on
        assert (outcome.version, outcome.replica) == (99, 0)
        assert ("version 99" if why == "the relay lacks it" else "nobody listens") in outcome.cause
        await published.check_serves(replica, 1)


def _lease_elsewhere(version: int) -> Any:
    return lease_of("no-such-run", 0, b"token", version, 0.1)


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


async def test_a_log_prob_that_is_no_number_fails_its_trajectory_by_name(published, make_controller, monkeypatch):
    """What stands before the colon is what dropped trajectories are counted under."""
    controller = make_controller()
    batch = controller.dispatch(3)
    extend = EmbeddedEngine._extend

    def spoil_one(self: EmbeddedEngine, sequence: Any, token: int, logprob: float) -> Any:
        spoilt = sequence.request.id == batch[1].trajectory and sequence.num_new == 2
        return extend(self, sequence, token, math.nan if spoilt else logprob)

    monkeypatch.setattr(EmbeddedEngine, "_extend", spoil_one)
    async with Replica(0, controller, published.lease) as replica:
        await replica.load(1)
        replica.generate(batch)
        await replica.finish(batch)
    assert list(replica.failed) == [batch[1].trajectory]
    assert replica.failed[batch[1].trajectory].cause == "engine: version 1 gave log-prob nan for response token 2"


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
    async with Replica(
        0, controller, published.lease, worker=worker_around(engine, controller, published.lease)
    ) as replica:
        await replica.load(0)
        replica.generate(controller.dispatch(2))
        await engine.close()
        await reach("the reports have ended", replica.listening.done)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            replica.listening.result()
        replica.listening = asyncio.create_task(asyncio.sleep(0))


class DyingEngine(EmbeddedEngine):
    """Loses what decodes after so many steps."""

    num_steps_to_live = 12

    async def next(self) -> list[Delta]:
        if self.num_steps_to_live == 0:
            raise EngineDied("its process is gone")
        self.num_steps_to_live -= 1
        return await super().next()


async def test_an_engine_that_dies_costs_no_token_that_it_has_delivered(published, make_controller):
    """The worker's last report has them all; only then does it say what happened."""
    controller = make_controller(report_interval_s=2.0)
    engine = DyingEngine(controller.config.engine, WARM, stop_token_ids=())
    worker = worker_around(engine, controller, published.lease)
    async with Replica(0, controller, published.lease, worker=worker) as replica:
        await replica.load(0)
        assignments = controller.dispatch(2)
        replica.generate(assignments)
        with pytest.raises(EngineDied, match="its process is gone"):
            await replica.finish(assignments)
        replica.listening = asyncio.create_task(asyncio.sleep(0))
    # The first step takes the prompts in and gives a token too.
    assert [len(controller.token_ids(a.trajectory)) for a in assignments] == [12, 12]


@pytest.mark.parametrize("move_kv", [False, True])
async def test_a_move_takes_the_cache_along_if_it_is_told_to(published, make_controller, move_kv):
    """The target then takes in no prompt; without, all of them. What comes out is the same (test_token_continuity)."""
    brought: list[int] = []

    class Notes(EmbeddedEngine):
        def submit(self, requests: Sequence[Request]) -> None:
            brought.append(sum(request.kv is not None for request in requests))
            super().submit(requests)

    controller = make_controller(move_kv=move_kv)
    target = Notes(controller.config.engine, WARM, stop_token_ids=())
    worker = worker_around(target, controller, published.lease)
    async with (
        Replica(1, controller, published.lease) as source,
        Replica(0, controller, published.lease, worker=worker) as other,
    ):
        await source.load(0)
        await other.load(0)
        batch = controller.dispatch(4)
        source.generate(batch)
        await source.reach("tokens of all", lambda: all(controller.token_ids(a.trajectory) for a in batch))
        again = controller.moved((await source.release(batch)).progress)
        other.generate(again)
        await other.finish(again)
        assert again
        assert sum(brought) == (len(again) if move_kv else 0)
