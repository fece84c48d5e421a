"""Wraps each process of a run as a Ray actor: what it is made of, and how it is spoken to.

Ray places these, starts them and carries control messages. Weights and failure detection stay off it. Heavy imports
happen inside, so that the driver and light actors do not pay for them.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import ray
from ray.actor import exit_actor

from laminar.config import Config
from laminar.control.messages import (
    CommandId,
    Failed,
    MachineId,
    RelayReport,
    ReplicaId,
    ReplicaStarted,
    Score,
    Scored,
    SenderReport,
    TrajectoryId,
    VersionComplete,
    VersionEvicted,
)
from laminar.data.records import Experience, ScoringTask, Task, WorkerReport

if TYPE_CHECKING:
    from laminar.relay.happenings import RelayHappening, SenderHappening

RELAY_REPORT_INTERVAL_S = 0.1


class RunSecrets(msgspec.Struct, frozen=True):
    """What the processes of one run know and nobody else: its name among sockets, and the token that proves it."""

    run_id: str
    token: bytes


class RolloutActor:
    """One replica: the engine and the worker around it."""

    def __init__(self, replica: ReplicaId, machine: MachineId, config: Config, secrets: RunSecrets) -> None:
        self._replica = replica
        self._machine = machine
        self._config = config
        self._secrets = secrets

    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> ReplicaStarted:
        from laminar.envs.sandbox.build import reach_sandbox
        from laminar.envs.sandbox.channel import Address
        from laminar.relay.lease import Reader
        from laminar.rollout.build import build_worker

        deadline_s = self._config.faults.load_deadline_s
        self._reader = Reader(self._secrets.run_id, self._machine, self._secrets.token)
        address = Address(self._secrets.run_id, self._machine, self._secrets.token)
        self._sandbox = reach_sandbox(self._config.sandbox, address)
        self._worker = await build_worker(
            self._replica,
            self._machine,
            self._config,
            lambda version: self._reader.lease(version, deadline_s),
            self._sandbox,
        )
        return self._worker.start()

    async def reports(self) -> list[WorkerReport]:
        return await self._worker.reports()

    async def generate(self, tasks: Sequence[Task], evaluation: bool) -> None:
        self._worker.generate(tasks, evaluation=evaluation)

    async def release(self, command: CommandId, trajectories: Sequence[TrajectoryId]) -> None:
        await self._worker.release(command, trajectories)

    async def load(self, command: CommandId, version: int, interrupt: bool) -> None:
        await self._worker.load(command, version, interrupt=interrupt)

    async def close(self) -> None:
        await self._worker.close()
        await self._sandbox.close()
        exit_actor()


class RelayActor:
    """The relay of one machine."""

    def __init__(self, machine: MachineId, host: str, config: Config, secrets: RunSecrets) -> None:
        self._machine = machine
        self._host = host
        self._config = config
        self._secrets = secrets
        self._happenings: list[RelayHappening] = []
        self._happened = asyncio.Event()

    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> tuple[str, int]:
        """Returns the address at which its upstream reaches it."""
        from laminar.relay.relay import Relay

        loop = asyncio.get_running_loop()

        def note_from_thread(happening: "RelayHappening") -> None:
            loop.call_soon_threadsafe(self._note, happening)

        self._relay = Relay(
            self._machine,
            self._secrets.run_id,
            self._secrets.token,
            self._config.relay,
            on_event=note_from_thread,
            host=self._host,
        )
        return self._relay.address

    async def reports(self) -> "tuple[list[VersionComplete | VersionEvicted | RelayReport], list[RelayHappening]]":
        """What control is to hear, ending with a heartbeat; and all that happened, for the run's log."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._happened.wait(), RELAY_REPORT_INTERVAL_S)
        self._happened.clear()
        happenings, self._happenings = self._happenings, []
        status = self._relay.status()
        events: list[VersionComplete | VersionEvicted | RelayReport] = [
            h for h in happenings if isinstance(h, VersionComplete | VersionEvicted)
        ]
        events.append(
            RelayReport(
                self._machine,
                status.incoming_version,
                status.incoming_bytes,
                status.sending_version,
                status.sending_bytes,
                status.next_is_lost,
            )
        )
        return events, happenings

    async def set_next(self, address: tuple[str, int] | None, epoch: int) -> None:
        self._relay.set_next(address, epoch)

    async def send_version(self, version: int, address: tuple[str, int]) -> None:
        """Send an older version to another machine's relay; raises what kept it from arriving."""
        await asyncio.to_thread(self._relay.send_version, version, address)

    async def retain(self, versions: tuple[int, ...]) -> None:
        self._relay.retain(versions)

    async def close(self) -> None:
        await asyncio.to_thread(self._relay.close)
        exit_actor()

    def _note(self, happening: "RelayHappening") -> None:
        self._happenings.append(happening)
        self._happened.set()


class TrainerActor:
    """One rank of the trainer, and the publisher of what it holds. Every call goes to all ranks, in the same order.

    Beside training (concurrency groups): "links", "watch", "checkpoint".
    """

    def __init__(self, rank: int, host: str, config: Config, secrets: RunSecrets) -> None:
        self._rank = rank
        self._host = host
        self._config = config
        self._secrets = secrets
        self._closed = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def rendezvous(self) -> tuple[str, int] | None:
        """Of rank 0: open the place where the ranks meet; none if there is nobody to meet."""
        from laminar.train.ranks import Rendezvous, must_join

        if not must_join(self._config.trainer):
            return None
        self._rendezvous = Rendezvous(self._host, self._config.trainer, self._config.faults.start_deadline_s)
        return self._rendezvous.address

    def start(self, address: tuple[str, int] | None, restore_from: Path | None) -> int:
        """Returns the step whose weights it holds."""
        import torch

        from laminar.relay.publish import Publisher
        from laminar.train.checkpoint import CHECKPOINTS_FOLDER
        from laminar.train.ranks import ALONE, join
        from laminar.train.saver import Saver
        from laminar.train.trainer import Trainer

        torch.set_num_threads(1)
        config, deadline_s = self._config, self._config.faults.start_deadline_s
        ranks = ALONE
        if address is not None:
            ranks = join(address, self._rank, config.trainer, host=self._host, start_deadline_s=deadline_s)
        self._trainer = Trainer(config, ranks)
        if restore_from is not None:
            self._trainer.restore(restore_from)
        self._saver = Saver(config.run_dir / CHECKPOINTS_FOLDER, config.checkpoint.num_kept, ranks)
        secrets, num_ranks = self._secrets, ranks.num_ranks
        self._publisher = Publisher(secrets.run_id, secrets.token, config.relay, rank=self._rank, num_ranks=num_ranks)
        # Fixes the layout and pre-faults the memory, so that the first hand-over costs a copy like the others.
        self._publisher.prepare(
            self._trainer.held_weights(), dtype=self._trainer.publish_dtype, rows=self._trainer.held_rows()
        )
        return self._trainer.num_steps_done

    @ray.method(concurrency_group="links")
    def set_master(self, address: tuple[str, int] | None, epoch: int) -> None:
        self._publisher.set_master(address, epoch=epoch)

    @ray.method(concurrency_group="links")
    def sender_report(self) -> "tuple[SenderReport, Sequence[SenderHappening]]":
        """How far the hand-over is on its way, and what happened to those before, for the run's log."""
        status = self._publisher.sender_status()
        report = SenderReport(status.version, status.num_bytes, status.master_is_lost)
        return report, self._publisher.sender_events()

    @ray.method(concurrency_group="watch")
    def until_closed(self) -> None:
        """Whoever waits for it hears of this process's death at once, also while nothing is asked of it."""
        self._closed.wait()

    def train_mini_batch(self, step: int, index: int, experiences: Sequence[Experience]) -> dict[str, float]:
        return self._trainer.train_mini_batch(step, index, experiences)

    def publish(self, version: int, step: int, num_relays: int) -> float:
        """Returns the stall in seconds: the copy into host memory, and the wait for the one before, if any."""
        stall_s = self._publisher.hand_over(
            self._trainer.held_weights(),
            version=version,
            step=step,
            probe=self._trainer.probe(),
            dtype=self._trainer.publish_dtype,
            num_relays=num_relays,
        )
        self._trainer.version = version
        return stall_s

    def begin_save(self, step: int) -> bool:
        """Copy the state; it is written while training goes on."""
        self._saver.begin(step, self._trainer.state())
        return True

    @ray.method(concurrency_group="checkpoint")
    def finish_save(self) -> bool:
        """Wait until what was begun is complete on disk; raises what kept it from that."""
        self._saver.finish()
        return True

    def close(self) -> None:
        self._closed.set()
        self._publisher.close()
        self._saver.close()
        exit_actor()


class RewardActor:
    """Scores responses of its machine's share in processes of their own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        from laminar.data.tokens import text_decoder
        from laminar.envs.rewards import RewardPool

        reward = self._config.reward
        self._decode = text_decoder(self._config.model.path, skip_special_tokens=True)
        self._pool = RewardPool(self._config.scored_by, timeout_s=reward.timeout_s, num_workers=reward.num_workers)
        await self._pool.start()

    async def score(self, command: CommandId, tasks: Sequence[ScoringTask]) -> tuple[Scored, dict[str, list[float]]]:
        """Returns the event, and what else the rewards gave, by name, for metrics."""
        from laminar.envs.reward_worker import Reward, RewardCall

        calls = [
            RewardCall(
                data_source=t.prompt.data_source,
                solution_str=self._decode(t.response_token_ids),
                ground_truth=t.prompt.ground_truth,
                extra_info=t.prompt.extra_info,
            )
            for t in tasks
        ]
        scores: list[Score] = []
        failed: list[Failed] = []
        extras: dict[str, list[float]] = {}
        for task, outcome in zip(tasks, await self._pool.score(calls), strict=True):
            if isinstance(outcome, Reward):
                scores.append(Score(task.trajectory, task.attempt, outcome.score))
                for name, value in outcome.extras.items():
                    extras.setdefault(name, []).append(value)
            else:
                failed.append(Failed(task.trajectory, task.attempt, f"reward_{outcome.kind}: {outcome.cause}"))
        return Scored(command, tuple(scores), tuple(failed)), extras

    async def close(self) -> None:
        await self._pool.close()
        exit_actor()


class SandboxActor:
    """The sandbox of one machine, which all of its replicas share."""

    def __init__(self, machine: MachineId, config: Config, secrets: RunSecrets) -> None:
        self._machine = machine
        self._config = config
        self._secrets = secrets

    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        from laminar.envs.sandbox.build import start_sandbox
        from laminar.envs.sandbox.channel import Address
        from laminar.envs.sandbox.server import SandboxServer

        address = Address(self._secrets.run_id, self._machine, self._secrets.token)
        self._server = SandboxServer(await start_sandbox(self._config.sandbox), address)
        await self._server.start()

    async def serve(self) -> None:
        """Never returns: whoever waits for it learns of this process's death."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._server.close()
        exit_actor()
