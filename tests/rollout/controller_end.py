"""Plays the controller for the worker's tests: hands trajectories out by id and takes reports in as the cluster does.

Controller ── tasks from the payload ──► Replica (a true worker, engine and lease)
    ▲ payload.store, then the event  ◄── reports()
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.iterate.task import make_problem
from laminar.cluster.payload import Payload
from laminar.config import Config, DataConfig, EmbeddedEngineConfig, FaultsConfig, ModelConfig, RolloutConfig
from laminar.control.messages import (
    Assignment,
    CommandId,
    Failed,
    Finished,
    GroupId,
    Loaded,
    LoadFailed,
    MachineId,
    Progress,
    PromptId,
    Released,
    ReplicaId,
    ReplicaReport,
    Score,
    Scored,
    ScoreTrajectories,
    TrainMiniBatch,
    TrajectoryId,
)
from laminar.data.prompt_pool import PromptPool
from laminar.data.records import Experience, Prompt
from laminar.data.tokens import text_encoder
from laminar.envs.sandbox.sandbox import NoSandbox, Sandbox
from laminar.rollout.build import build_worker
from laminar.rollout.engines.engine import Engine
from laminar.rollout.episode import EpisodeRules
from laminar.rollout.worker import Lease, RolloutWorker
from tests.rollout.waiting import reach

ROOT = Path(__file__).parents[2]
WARM = ROOT / "examples" / "iterate" / "warm"
ENVIRONMENTS = Path(__file__).parent / "turn_environments.py"
TWO_TURN = ROOT / "tests" / "envs" / "two_turn.py"
TEMPERATURE = 1.3
GROUP_SIZE = 4
NUM_PROMPTS = 64


def make_config(
    *,
    environment: str | None = None,
    temperature: float = TEMPERATURE,
    response_tokens_max: int = 160,
    report_interval_s: float = 0.01,
    model_path: Path = WARM,
    move_kv: bool = False,
    **engine: Any,
) -> Config:
    return Config(
        model=ModelConfig(path=model_path),
        data=DataConfig(
            train_files=(Path("unused.parquet"),), prompt_tokens_max=32, response_tokens_max=response_tokens_max
        ),
        rollout=RolloutConfig(
            temperature=temperature,
            report_interval_s=report_interval_s,
            environment=environment,
            num_turns_max=4,
            move_kv=move_kv,
        ),
        engine=EmbeddedEngineConfig.model_validate({"num_slots": 16, "kv_capacity_tokens": 4096} | engine),
        faults=FaultsConfig(report_deadline_s=max(5.0, 2 * report_interval_s)),
        seed=3,
    )


def make_prompts(extra_info: dict[str, Any] | None = None) -> list[Prompt]:
    """The example's problems; those of the same group size apart have the same prompt."""
    encode, rng = text_encoder(WARM), random.Random(1)
    problems = [make_problem(rng) for _ in range(NUM_PROMPTS)]
    return [
        Prompt(
            PromptId(i),
            tuple(encode(problem.prompt)),
            "iterate",
            problem.answer,
            {"tool_output": i} | (extra_info or {}),
        )
        for i, problem in enumerate(problems)
    ]


class Controller:
    """The payload of one run, and ids that count up. Every report is checked as it comes in."""

    def __init__(self, config: Config, folder: Path, prompts: Sequence[Prompt] | None = None) -> None:
        self.config = config
        self.payload = Payload(
            folder / "journal.sqlite", PromptPool(prompts or make_prompts()), PromptPool(()), config.seed
        )
        self.assignments: dict[TrajectoryId, Assignment] = {}
        self._num_commands = 0

    def dispatch(self, num_trajectories: int) -> list[Assignment]:
        begin = len(self.assignments)
        fresh = [
            Assignment(TrajectoryId(i), 0, GroupId(i // GROUP_SIZE), PromptId(i // GROUP_SIZE % NUM_PROMPTS))
            for i in range(begin, begin + num_trajectories)
        ]
        self.assignments |= {a.trajectory: a for a in fresh}
        return fresh

    def moved(self, progress: Sequence[Progress]) -> list[Assignment]:
        """The next attempt of these, from where they stopped."""
        again = [
            Assignment(p.trajectory, p.attempt + 1, before.group, before.prompt, p.num_tokens)
            for p in progress
            if (before := self.assignments[p.trajectory])
        ]
        self.assignments |= {a.trajectory: a for a in again}
        return again

    def token_ids(self, trajectory: TrajectoryId) -> tuple[int, ...]:
        """Its response so far."""
        (task,) = self.payload.scoring_tasks([self.assignments[trajectory]], evaluation=False)
        return task.response_token_ids

    def experiences(self, trajectories: Sequence[TrajectoryId]) -> list[Experience]:
        """What the trainer would get; every second trajectory is scored 1, the others 0."""
        assignments = [self.assignments[id] for id in trajectories]
        scored = Scored(
            self.new_command(), tuple(Score(a.trajectory, a.attempt, float(a.trajectory % 2)) for a in assignments)
        )
        self.payload.store_scores(ScoreTrajectories(scored.command, tuple(assignments)), scored)
        groups = tuple(a.group for a in assignments)
        return self.payload.experiences(TrainMiniBatch(self.new_command(), 1, 0, tuple(trajectories), groups))

    def new_command(self) -> CommandId:
        self._num_commands += 1
        return CommandId(self._num_commands)


class Replica:
    """A rollout worker and the pump that listens to it; alive inside `async with`."""

    def __init__(
        self,
        id: int,
        controller: Controller,
        lease: Lease,
        *,
        worker: RolloutWorker | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.controller = controller
        self.worker: RolloutWorker
        self._id, self._lease, self._given = ReplicaId(id), lease, worker
        self._sandbox = sandbox or NoSandbox()
        self.events: list[ReplicaReport | Released | Loaded | LoadFailed] = []
        self.finished: dict[TrajectoryId, Finished] = {}
        self.failed: dict[TrajectoryId, Failed] = {}
        self.listening: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        config = self.controller.config
        self.worker = self._given or await build_worker(self._id, MachineId(0), config, self._lease, self._sandbox)
        self.worker.start()
        self.listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.listening.cancel()
        with suppress(asyncio.CancelledError):
            await self.listening
        await self.worker.close()

    async def load(self, version: int, *, interrupt: bool = False) -> Loaded | LoadFailed:
        command = self.controller.new_command()
        await self.worker.load(command, version, interrupt=interrupt)
        return await self._outcome(command)

    def generate(self, assignments: Sequence[Assignment]) -> None:
        self.worker.generate(self.controller.payload.tasks(assignments, evaluation=False), evaluation=False)

    async def release(self, assignments: Sequence[Assignment]) -> Released:
        command = self.controller.new_command()
        await self.worker.release(command, [a.trajectory for a in assignments])
        return await self._outcome(command)

    async def finish(self, assignments: Sequence[Assignment]) -> None:
        ids = [a.trajectory for a in assignments]
        await self.reach(
            f"trajectories {ids} ended", lambda: all(id in self.finished or id in self.failed for id in ids)
        )

    def waiting(self) -> set[TrajectoryId]:
        """Those whose last report says that they wait for the environment."""
        last: dict[TrajectoryId, bool] = {}
        for event in self.events:
            for progress in event.progress if isinstance(event, ReplicaReport) else ():
                last[progress.trajectory] = progress.waiting_for_tool
        return {id for id, waiting in last.items() if waiting}

    async def reach(self, what: str, reached: Any) -> None:
        """Until it is so; a worker that dies meanwhile raises what it died of."""
        await reach(what, lambda: self.listening.done() or reached())
        if self.listening.done():
            self.listening.result()

    async def _outcome(self, command: CommandId) -> Any:
        def outcome() -> Any:
            return next((e for e in self.events if not isinstance(e, ReplicaReport) and e.command == command), None)

        await self.reach(f"the outcome of command {command}", outcome)
        return outcome()

    async def _listen(self) -> None:
        while True:
            for report in await self.worker.reports():
                self.controller.payload.store(report)
                self._take_in(report.event)
                self.events.append(report.event)

    def _take_in(self, event: ReplicaReport | Released | Loaded | LoadFailed) -> None:
        """What an event speaks of is in the pool when it arrives: neither fewer tokens nor more."""
        for progress in event.progress if isinstance(event, ReplicaReport | Released) else ():
            assert len(self.controller.token_ids(progress.trajectory)) == progress.num_tokens, progress
        if isinstance(event, ReplicaReport):
            for finished in event.finished:
                assert len(self.controller.token_ids(finished.trajectory)) == finished.num_tokens, finished
                assert finished.trajectory not in self.finished, "it finished twice"
            self.finished |= {f.trajectory: f for f in event.finished}
            self.failed |= {f.trajectory: f for f in event.failed}


def worker_around(engine: Engine, controller: Controller, lease: Lease) -> RolloutWorker:
    """A single-turn worker whose engine the test keeps in its hands."""
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
        move_kv=controller.config.rollout.move_kv,
    )


def ids_of(assignments: Sequence[Assignment]) -> list[TrajectoryId]:
    return [a.trajectory for a in assignments]
