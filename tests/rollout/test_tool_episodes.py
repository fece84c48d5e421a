"""Trajectories with tools through moves, a killed replica and every fault of a tool: nothing lost, nothing doubled."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from examples.calculator.task import make_problem
from laminar.control.messages import Progress, PromptId, TrajectoryId
from laminar.data.records import Prompt
from laminar.data.tokens import text_decoder, text_encoder
from laminar.envs.sandbox.sandbox import Outcome, SandboxUnavailable
from laminar.rollout.engines.embedded import EmbeddedEngine
from tests.rollout.controller_end import Controller, Replica, ids_of, make_config
from tests.rollout.trainer_end import TrainerEnd

MODEL = Path(__file__).parents[2] / "examples" / "calculator" / "warm"
REPLAY_ERROR_MAX = 1e-3
"""As LOGPROB_ERROR_MAX, for a model that was trained: where a result ends, one unit in the last place of its input
moves a log-prob by 1e-5, and a batch put together in another way by up to 1.4e-4 (float32, seen against float64)."""
ONCE = f"{Path(__file__).parent / 'turn_environments.py'}:OnceOnly"
FIRST_RESULT = 10_000


class Numbered:
    """A sandbox whose every result is a number of its own, given after a while that differs from call to call."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.given: list[str] = []
        self.num_running = 0
        self.num_begun = 0
        self.hold: asyncio.Event | None = None
        self._delay_s = delay_s
        self._numbers = itertools.count(FIRST_RESULT)
        self._rng = random.Random(5)

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        self.num_begun += 1
        self.num_running += 1
        try:
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(self._delay_s * self._rng.random())
        finally:
            self.num_running -= 1
        self.given.append(str(next(self._numbers)))
        return Outcome("ok", f"{self.given[-1]}\n", 0.0)

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def calculators() -> Iterator[TrainerEnd]:
    end = TrainerEnd(config())
    end.publish_complete()
    yield end
    end.close()


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[TrajectoryId, dict[int, int]]:
    """Every id that an engine sampled, by trajectory and position, the last attempt's where there were several."""
    taken: dict[TrajectoryId, dict[int, int]] = {}
    extend = EmbeddedEngine._extend

    def take_down(self: EmbeddedEngine, sequence: Any, token: int, logprob: float) -> Any:
        position = sequence.request.position + sequence.num_new
        taken.setdefault(sequence.request.id, {})[position] = token
        return extend(self, sequence, token, logprob)

    monkeypatch.setattr(EmbeddedEngine, "_extend", take_down)
    return taken


def config(environment: str = "math_with_code", **changes: Any) -> Any:
    settings = {"model_path": MODEL, "temperature": 1.0, "response_tokens_max": 200, "num_slots": 32}
    return make_config(environment=environment, **(settings | changes))


def controller_of(config: Any, folder: Path) -> Controller:
    encode, rng = text_encoder(MODEL), random.Random(1)
    problems = [make_problem(rng) for _ in range(64)]
    prompts = [Prompt(PromptId(i), tuple(encode(p.prompt)), "calculator", p.answer, {}) for i, p in enumerate(problems)]
    return Controller(config, folder, prompts)


def observed(token_ids: list[int], mask: list[int]) -> list[str]:
    """What was observed, run by run."""
    decode = text_decoder(MODEL, skip_special_tokens=False)
    runs = groupby(zip(token_ids, mask, strict=True), key=lambda token: token[1])
    return [decode([id for id, _ in run]) for masked, run in runs if masked == 0]


async def test_two_hundred_trajectories_through_moves_and_a_killed_replica(calculators, sampled, tmp_path):
    """Ids trained on are ids sampled, masks are exact, and every result that was given to a turn is in it once."""
    controller = controller_of(config(), tmp_path)
    sandbox = Numbered(delay_s=0.05)
    replicas = [Replica(id, controller, calculators.lease, sandbox=sandbox) for id in range(3)]
    async with replicas[1] as second, replicas[2] as third:
        first = await replicas[0].__aenter__()
        for replica in replicas:
            await replica.load(0)
        batch = controller.dispatch(200)
        first.generate(batch[:100])
        second.generate(batch[100:])
        num_moved_while_waiting = 0
        for begin in (0, 25, 50):
            await first.reach("some wait for the tool", lambda: first.waiting())
            released = await first.release(batch[begin : begin + 25])
            num_moved_while_waiting += sum(p.waiting_for_tool for p in released.progress)
            third.generate(controller.moved(released.progress))
        rest = set(ids_of(batch[75:100]))
        sandbox.hold = asyncio.Event()  # whoever calls now is still waiting when the replica dies
        await first.reach(
            "it holds calls, or nothing", lambda: first.waiting() & rest or not rest - set(first.finished)
        )
        rescued = await kill(first, controller, ids_of(batch[:100]))
        num_killed_while_waiting = sum(p.waiting_for_tool for p in rescued)
        sandbox.hold.set()
        third.generate(controller.moved(rescued))
        ended = lambda: {*first.finished, *second.finished, *third.finished}  # noqa: E731
        await third.reach("all have ended", lambda: second.listening.done() or len(ended()) == 200)
        assert not (first.failed or second.failed or third.failed)
    assert num_moved_while_waiting > 0
    assert num_killed_while_waiting > 0

    results: Counter[str] = Counter()
    for experience in controller.experiences(ids_of(batch)):
        response = experience.response
        own = {k: id for k, (id, m) in enumerate(zip(response.token_ids, response.loss_mask, strict=True)) if m}
        assert own == {k: sampled[experience.trajectory][k] for k in own}
        assert calculators.replay_error(experience) < REPLAY_ERROR_MAX
        texts = observed(response.token_ids, response.loss_mask)
        assert all(text.startswith("<output>") and text.endswith("</output>") for text in texts), texts
        results.update(text.removeprefix("<output>").removesuffix("</output>") for text in texts)
        check_turns(response.token_ids, response.loss_mask)
    numbers = {text: count for text, count in results.items() if text.isdigit()}
    assert len(numbers) > 200
    assert set(numbers.values()) == {1}, "a result was used twice"
    assert set(numbers) <= set(sandbox.given)
    # What was asked again gave another number, and the first was heard by nobody.
    assert sandbox.num_begun > len(numbers)


def check_turns(token_ids: list[int], mask: list[int]) -> None:
    """Every call but that of a last turn is answered, right after it, and nothing else is."""
    (code_end,) = text_encoder(MODEL)("</code>")
    for k, (id, own) in enumerate(zip(token_ids, mask, strict=True)):
        follows = mask[k + 1] if k + 1 < len(mask) else None
        if own and id == code_end:
            assert follows in (0, None)
        elif own:
            assert follows in (1, None)


async def kill(replica: Replica, controller: Controller, ids: list[TrajectoryId]) -> list[Progress]:
    """The replica is gone, with what it had not reported; returns how far its trajectories are known to be."""
    replica.listening.cancel()
    with suppress(asyncio.CancelledError):
        await replica.listening
    await replica.worker.close()
    waiting = replica.waiting()
    mine = [id for id in ids if controller.assignments[id].attempt == 0 and id not in replica.finished]
    return [Progress(id, 0, len(controller.token_ids(id)), waiting_for_tool=id in waiting) for id in mine]


# ----------------------------------------------------------------------------------------- calls that are made once


async def test_a_call_that_must_not_be_repeated_keeps_its_trajectory_where_it_is(calculators, tmp_path):
    controller = controller_of(config(ONCE), tmp_path)
    sandbox = Numbered()
    sandbox.hold = asyncio.Event()
    async with Replica(0, controller, calculators.lease, sandbox=sandbox) as replica:
        await replica.load(0)
        batch = controller.dispatch(8)
        replica.generate(batch)
        await replica.reach("one is asked about", lambda: sandbox.num_running and replica.waiting())
        num_before, waiting = sandbox.num_begun, replica.waiting()
        released = await replica.release(batch)
        assert not waiting & {p.trajectory for p in released.progress}
        assert not any(p.waiting_for_tool for p in released.progress)
        sandbox.hold.set()
        await replica.finish([a for a in batch if a.trajectory in waiting])
        replica.generate(again := controller.moved(released.progress))
        await replica.finish(again)
        assert not replica.failed
    answers = [
        text
        for e in controller.experiences(ids_of(batch))
        for text in observed(e.response.token_ids, e.response.loss_mask)
    ]
    assert len(answers) == len(set(answers)) == sandbox.num_begun >= num_before


async def test_a_replica_lost_in_a_call_that_must_not_be_repeated_fails_the_trajectory_by_name(calculators, tmp_path):
    controller = controller_of(config(ONCE), tmp_path)
    sandbox = Numbered()
    sandbox.hold = asyncio.Event()
    lost = await Replica(0, controller, calculators.lease, sandbox=sandbox).__aenter__()
    await lost.load(0)
    batch = controller.dispatch(8)
    lost.generate(batch)
    await lost.reach(
        "all wait or have ended", lambda: len(lost.waiting()) and len(lost.waiting() | set(lost.finished)) == 8
    )
    async with Replica(1, controller, calculators.lease, sandbox=sandbox) as other:
        await other.load(0)
        rescued = await kill(lost, controller, ids_of(batch))
        num_begun = sandbox.num_begun
        other.generate(again := controller.moved(rescued))
        await other.finish(again)
        assert sandbox.num_begun == num_begun, "it was asked twice"
        assert {f.cause for f in other.failed.values()} == {
            "environment: its replica was lost while OnceOnly, which is not repeatable, was asked"
        }


# ------------------------------------------------------------------------------------------------ faults of the tool


class Faulty:
    """Answers as a tool does that the model, or the world, does harm to."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        match self._fault:
            case "never returns":
                await asyncio.sleep(600)
                raise AssertionError("nobody waits so long")
            case "prints a megabyte":
                return Outcome("output", "x" * 2**20, 1.0)
            case "kills its process":
                return Outcome("killed", "", 0.1)
            case "the pool has died":
                raise SandboxUnavailable("the sandbox of machine 0 died 3 times")
            case _:
                raise AssertionError(self._fault)

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("fault", "told", "failed"),
    [
        ("never returns", None, "environment: MathWithCode.observe took more than 0.3 s"),
        ("prints a megabyte", " …[cut]… ", None),
        ("kills its process", "[stopped: a signal ended it]", None),
        (
            "the pool has died",
            None,
            "environment: MathWithCode.observe raised SandboxUnavailable: the sandbox of machine 0 died 3 times",
        ),
    ],
)
async def test_a_fault_of_the_tool_is_told_to_the_model_or_fails_the_trajectory_by_name(
    calculators, tmp_path, fault, told, failed
):
    """The others go on, and every trajectory ends one way or the other."""
    changed = config()
    changed = changed.model_copy(
        update={
            "rollout": changed.rollout.model_copy(update={"environment_timeout_s": 0.3, "observation_tokens_max": 30})
        }
    )
    controller = controller_of(changed, tmp_path)
    async with Replica(0, controller, calculators.lease, sandbox=Faulty(fault)) as replica:
        await replica.load(0)
        batch = controller.dispatch(24)
        replica.generate(batch)
        await replica.finish(batch)
    assert len(replica.finished) + len(replica.failed) == 24
    assert len(replica.finished) > 0, "those without a call"
    assert {f.cause for f in replica.failed.values()} == ({failed} if failed else set())
    whole = [a.trajectory for a in batch if a.trajectory in replica.finished]
    texts = [
        text for e in controller.experiences(whole) for text in observed(e.response.token_ids, e.response.loss_mask)
    ]
    assert told is None or sum(told in text for text in texts) > 8
    assert all(len(text_encoder(MODEL)(text)) <= 30 for text in texts)
    assert max(finished.num_tokens for finished in replica.finished.values()) <= 200


async def test_a_model_that_writes_nonsense_is_told_so_and_trains_on(calculators, tmp_path):
    """Hot enough, it writes what is no Python, or calls without an end."""
    controller = controller_of(config(temperature=3.0, response_tokens_max=120), tmp_path)
    async with Replica(0, controller, calculators.lease, sandbox=Numbered()) as replica:
        await replica.load(0)
        batch = controller.dispatch(48)
        replica.generate(batch)
        await replica.finish(batch)
    assert not replica.failed
    for experience in controller.experiences(ids_of(batch)):
        check_turns(experience.response.token_ids, experience.response.loss_mask)
