"""Keeps one vLLM: starts its processes, calls it with its death in view, ends it."""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

from laminar.rollout.engines.engine import EngineDied
from laminar.rollout.engines.vllm_folder import VllmFolder
from laminar.rollout.engines.vllm_stats import StepStats, stat_logger

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

DEATH_CHECK_INTERVAL_S = 0.1
GONE = "vLLM's processes are gone"
END_DEADLINE_S = 5
"""For vLLM's processes to end by themselves; they hold nothing worth more."""
Result = TypeVar("Result")


class VllmProcess:
    """AsyncLLM (`llm`) and the life of the processes behind it. Belongs to the event loop that it was made in.

    stepped: set when the outputs of an engine step are in, and when vLLM dies; who waits clears it. stats: of the last
    step. death: why nothing more will come, or None.
    """

    def __init__(self, arguments: "AsyncEngineArgs") -> None:
        """Blocks until vLLM's processes are up: seconds on a CPU, minutes with CUDA graphs.

        In the caller's thread, because vLLM's scheduler is killed by the kernel when the thread that started it ends.
        """
        self.stats = StepStats()
        self.stepped = asyncio.Event()
        self.death: str | None = None
        self._folder = VllmFolder()
        try:
            with _temporary_files_in(str(self._folder.path)):
                self.llm = AsyncLLM.from_engine_args(
                    arguments, stat_loggers=[stat_logger(self.stats, on_step=self.stepped.set)]
                )
        except BaseException:
            self._folder.close()
            raise
        self._dead = asyncio.Event()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def call(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        """The call's result. Raises EngineDied, saying what it was for, if vLLM dies before: its own would wait on."""
        calling = asyncio.ensure_future(work)
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((calling, dying), return_when=asyncio.FIRST_COMPLETED)
            if not self._dead.is_set():
                return calling.result()
        except EngineDeadError:
            # It knows before _watch has looked.
            self.die(GONE)
        finally:
            calling.cancel()
            dying.cancel()
        raise EngineDied(f"{self.death}, while {what}")

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineDied(self.death)

    def die(self, cause: str) -> None:
        """Let everybody who waits know that nothing more comes."""
        self.death = self.death or cause
        self._dead.set()
        self.stepped.set()

    def close(self) -> None:
        self._watching.cancel()
        self.die("vLLM was closed")
        self.llm.shutdown(timeout=END_DEADLINE_S)
        self._folder.close()

    async def _watch(self) -> None:
        """vLLM notes the end of its processes within a tenth of a second, and tells only who asks."""
        while True:
            if self.llm.errored:
                self.die(GONE)
                return
            await asyncio.sleep(DEATH_CHECK_INTERVAL_S)


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """For processes started meanwhile; vLLM has no setting for where it puts its rendezvous files."""
    before = os.environ.get("TMPDIR")
    os.environ |= {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
