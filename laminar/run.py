"""The live run: build, start, loop, stop. Its heart is three lines; the simulator's differs by one noun."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from laminar.cluster.actors import RunSecrets
from laminar.cluster.cluster import Cluster
from laminar.cluster.folder import FolderLock
from laminar.cluster.payload import Payload
from laminar.cluster.processes import ProcessRegistry, end_dead_runs
from laminar.cluster.ray_session import RaySession
from laminar.cluster.sandboxes import needs_sandbox
from laminar.config import Config, VllmEngineConfig
from laminar.control.messages import AnyCommand, AnyEvent, EndRun
from laminar.control.plane import ControlPlane
from laminar.control.recovery import recover
from laminar.control.state import ClusterState
from laminar.data.chat import chat_encoder, load_tokenizer
from laminar.data.datasets import load_prompts
from laminar.data.prompt_pool import PromptPool
from laminar.envs.sandbox.build import start_sandbox
from laminar.envs.sandbox.sandbox import NoSandbox
from laminar.observe.event_log import EventLogWriter
from laminar.observe.observer import Observer
from laminar.observe.replay import restore
from laminar.rollout.build import start_environment
from laminar.rollout.engines.vllm_setup import refuse_without_vllm
from laminar.settings import CONFIG_FILE
from laminar.train.checkpoint import CHECKPOINTS_FOLDER, Checkpoint, newest_complete

JOURNAL_FILE = "journal.sqlite"
ONE_SIGNAL_S = 1.0
"""Signals closer together are one request."""


class Start(msgspec.Struct, frozen=True):
    """Where a start begins: from nothing, or from what an earlier one left."""

    state: ClusterState
    now: float
    checkpoint: Checkpoint | None
    resumed: bool
    num_prompts: int
    num_evaluation_prompts: int


def run(config: Config, *, resume: bool = False, fresh: bool = False) -> int:
    """Train, and return the exit status. Raises ValueError for what the user can set right."""
    stop = StopBeforeLoop()
    prompts, heldout = load_data(config)
    check_model(config)
    check_engine(config)
    if isinstance(config.engine, VllmEngineConfig) and config.cluster.address == "local":
        refuse_without_vllm()
    check_user_code(config)
    check_sandbox(config)
    stop.check()
    with FolderLock(config.run_dir, resume=resume, fresh=fresh):
        end_dead_runs()
        payload = Payload(config.run_dir / JOURNAL_FILE, prompts, heldout, config.seed)
        try:
            start = _start(config, len(prompts), len(heldout), resume=resume)
            if resume:
                payload.restore(start.state)
            (config.run_dir / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")
            return _run(config, payload, start, stop)
        finally:
            payload.close()


class World(Protocol):
    """What the loop drives: the cluster, or something that behaves like one."""

    def events(self) -> AsyncIterator[tuple[float, AnyEvent]]: ...

    def execute(self, command: AnyCommand) -> None:
        """Start the work and return; its outcome arrives later as an event."""
        ...


async def loop(cluster: World, control: ControlPlane, log: EventLogWriter, observer: Observer) -> EndRun:
    """The heart: events in, commands out, until control says that the run has ended."""
    async for now, event in cluster.events():
        log.append(now, event)
        commands = control.handle(event, now)
        for command in commands:
            cluster.execute(command)
        log.handled(commands, control.state)
        observer.observe(now, event, commands, control.state)
        if commands and isinstance(commands[-1], EndRun):
            return commands[-1]
    raise AssertionError("the events of a cluster do not end by themselves")


def load_data(config: Config) -> tuple[PromptPool, PromptPool]:
    """The training and the held-out prompts, tokenised."""
    data = config.data
    encode = chat_encoder(load_tokenizer(config.model.path))
    environment = start_environment(config, NoSandbox()) if config.rollout.environment is not None else None

    def load(files: tuple[Path, ...]) -> PromptPool:
        loaded = load_prompts(
            files,
            encode=encode,
            prompt_tokens_max=data.prompt_tokens_max,
            prompt_key=data.prompt_key,
            dedup=data.dedup,
            open_problem=environment.first_messages if environment is not None else None,
        )
        return PromptPool(loaded.prompts)

    return load(data.train_files), load(data.val_files) if data.val_files else PromptPool(())


def check_model(config: Config) -> None:
    """That the engine can serve the model, as far as its folder tells without loading it."""
    from laminar.rollout.engines.architecture import read_architecture

    path = config.model.path
    architecture = read_architecture(path)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"model.path={path} has no *.safetensors; save the model there with save_pretrained()")
    longest = config.data.prompt_tokens_max + config.data.response_tokens_max
    if longest > architecture.num_positions_max:
        raise ValueError(
            f"data.prompt_tokens_max + data.response_tokens_max = {longest} is more than the "
            f"{architecture.num_positions_max} positions that model.path={path} was made for; lower one of them"
        )


def check_engine(config: Config) -> None:
    """That the engine's memory can hold the model and one longest trajectory, as far as arithmetic tells."""
    from laminar.rollout.engines.architecture import read_architecture
    from laminar.rollout.engines.memory import gpu_memory, refuse_too_little_memory

    match config.engine:
        case VllmEngineConfig(device="cuda"):
            memory = gpu_memory(config.engine, read_architecture(config.model.path))
            refuse_too_little_memory(config.engine, memory, num_tokens_max=config.num_trajectory_tokens_max)
        case _:
            pass


def check_user_code(config: Config) -> None:
    """Load what gives rewards here once, so that a mistake shows before anything starts."""
    from laminar.envs.reward_worker import load_compute_score

    load_compute_score(config.scored_by)


def check_sandbox(config: Config) -> None:
    """That this machine can run the code of models safely, if it is to: start a sandbox, attack it, end it."""
    if not needs_sandbox(config):
        return

    async def try_out() -> None:
        await (await start_sandbox(config.sandbox)).close()

    asyncio.run(try_out())


def _run(config: Config, payload: Payload, start: Start, stop: "StopBeforeLoop") -> int:
    run_secrets = RunSecrets(secrets.token_hex(6), secrets.token_bytes(32))
    control = ControlPlane(
        config, num_prompts=start.num_prompts, num_evaluation_prompts=start.num_evaluation_prompts, state=start.state
    )
    with ExitStack() as stack:
        registry = ProcessRegistry(run_secrets.run_id)
        stack.callback(registry.close)
        session = RaySession(config.cluster)
        stack.callback(session.close)
        session.spread_replicas(config)  # what does not fit is refused before anything waits for it
        stop.check()
        registry.add_descendants()
        if session.folder is not None:
            registry.set_ray_folder(session.folder)
        log = EventLogWriter(
            config.run_dir,
            config=config,
            num_prompts=start.num_prompts,
            num_evaluation_prompts=start.num_evaluation_prompts,
            state=start.state,
            resumed=start.resumed,
        )
        stack.callback(log.close)
        observer = Observer(config, num_steps=config.num_steps(start.num_prompts))
        stack.callback(observer.close, control.state)
        if start.resumed:
            observer.resume(start.now, start.state)
        cluster = Cluster(
            config,
            session,
            run_secrets,
            payload,
            registry,
            observer,
            restore_from=start.checkpoint.folder if start.checkpoint is not None else None,
            start_s=start.now,
        )
        try:
            return asyncio.run(_start_loop_stop(cluster, control, log, observer))
        except asyncio.CancelledError:
            print("stopped at once; --resume goes on from the last checkpoint and what the journal holds")
            return 130
    raise AssertionError("unreachable: the stack swallows nothing")


async def _start_loop_stop(cluster: Cluster, control: ControlPlane, log: EventLogWriter, observer: Observer) -> int:
    interrupt = _Interrupt(cluster)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt, signal.Signals(number).name)
    try:
        cluster.start()
        ended = await loop(cluster, control, log, observer)
        print(f"the run has {'failed' if ended.failed else 'ended'}: {ended.cause}")
        if ended.failed:
            print(f"--resume goes on with it from step {control.state.trainer.saved_step}")
        return 1 if ended.failed else 0
    except ValueError as error:
        # In here it is our mistake, and must not pass for the user's.
        raise RuntimeError("the run met a mistake of Laminar's; events/ in its folder holds what led to it") from error
    finally:
        await cluster.close()


class StopBeforeLoop:
    """Until the loop takes signals itself, notes them: Python's own KeyboardInterrupt can get lost in an import."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def check(self) -> None:
        """Raise KeyboardInterrupt here, where it is safe, if somebody asked."""
        if self._asked:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


class _Interrupt:
    """The first Ctrl-C ends the run at the end of its step, with a checkpoint; a second at once.

    A supervisor that signals a process and its group sends two in a moment: they are one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._main = asyncio.current_task()
        self._asked_at_s: float | None = None

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        if self._asked_at_s is None:
            self._asked_at_s = now
            self._cluster.stop(f"stopped by {name}")
        elif now - self._asked_at_s > ONE_SIGNAL_S and self._main is not None:
            self._main.cancel()


FIXED_BY_START = ("model", "data", "batch", "seed")
"""Settings that the state of a run depends on: with others, a resumed run would mix two."""


def _check_same(recorded: Config, config: Config) -> None:
    before, now = (c.model_dump(exclude={"data": {"num_epochs"}}) for c in (recorded, config))
    for name in FIXED_BY_START:
        if before[name] != now[name]:
            raise ValueError(
                f"{config.run_dir} was begun with {name}={before[name]} and is now to go on with {now[name]}: "
                "a run keeps these settings; resume with them, or start another with run_dir=…"
            )


def _start(config: Config, num_prompts: int, num_evaluation_prompts: int, *, resume: bool) -> Start:
    if not resume:
        return Start(ClusterState(), 0.0, None, False, num_prompts, num_evaluation_prompts)
    run_dir = config.run_dir
    restored = restore(run_dir)
    if restored.num_prompts != num_prompts:
        raise ValueError(
            f"{run_dir} was run on {restored.num_prompts} prompts and data.train_files now gives {num_prompts}: "
            "resume with the same files and the same data.* settings"
        )
    _check_same(restored.config, config)
    checkpoint = newest_complete(run_dir / CHECKPOINTS_FOLDER)
    step = checkpoint.step if checkpoint is not None else 0
    if step < restored.state.trainer.saved_step:
        raise ValueError(
            f"{run_dir} was saved at step {restored.state.trainer.saved_step}, and the newest whole checkpoint there "
            f"is of step {step}: what was trained in between is gone; put checkpoints/ back, or start another run"
        )
    recover(restored.state, step=step)
    return Start(restored.state, restored.now, checkpoint, True, num_prompts, num_evaluation_prompts)
