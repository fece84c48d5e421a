"""Saves the trainer's state while training goes on: from a copy, in a thread of its own.

begin(step, state)   copy to host memory (the trainer's stall) ──► thread: write aside, sync, rename, mark complete
finish()             waits for the thread; raises what kept it from saving
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from laminar.train.checkpoint import CheckpointNotSaved, partial_folder, prune, save_complete
from laminar.train.ranks import Ranks
from laminar.train.sharded_state import State, write_state


class Saver:
    """One on each rank; all of them begin the same checkpoints. One checkpoint is written at a time.

    Rank 0 makes the folder and says when it is complete. All ranks must reach it under the same path.
    """

    def __init__(self, root: Path, num_kept: int, ranks: Ranks) -> None:
        self._root = root
        self._num_kept = num_kept
        self._ranks = ranks
        on_accelerator = ranks.device.type != "cpu"
        # The copy's memory is taken once and kept: fresh pages would cost more than the copy.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_accelerator,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_accelerator,
            )
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="laminar-checkpoint")
        self._saving: Future[None] | None = None

    def begin(self, step: int, state: State) -> None:
        """Copy the state and return; the caller may change it at once. The save before must have been finished."""
        if self._saving is not None:
            raise CheckpointNotSaved(f"checkpoint of step {step} not begun: the one before is still being written")
        copy = self._stager.stage(dict(state))
        assert not isinstance(copy, Future), "staging was asked to be synchronous"
        self._saving = self._thread.submit(self._save, step, copy)

    def finish(self) -> None:
        """Wait until the checkpoint is complete on disk. Raises CheckpointNotSaved, naming the cause, if it is not."""
        assert self._saving is not None, "no checkpoint was begun"
        try:
            self._saving.result()
        finally:
            self._saving = None

    def close(self) -> None:
        """What is still being written is given up: the process is about to end, and its folder is not complete."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _save(self, step: int, state: State) -> None:
        if not self._ranks.is_first:
            if not self._all_ready(True):
                raise CheckpointNotSaved(f"checkpoint of step {step}: rank 0 could not begin it")
            write_state(partial_folder(self._root, step), state, self._ranks)
            return
        begun = False

        def write(folder: Path) -> None:
            nonlocal begun
            begun = True
            self._all_ready(True)
            write_state(folder, state, self._ranks)

        try:
            save_complete(self._root, step, write)
        except OSError:
            if not begun:
                self._all_ready(False)
            raise
        prune(self._root, self._num_kept)

    def _all_ready(self, ready: bool) -> bool:
        """Whether all ranks are; the others wait here until rank 0 has made the folder, or could not."""
        if self._ranks.checkpoint_group is None:
            return ready
        flag = torch.tensor(int(ready))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._ranks.checkpoint_group)
        return bool(flag)
