"""Runs inside vLLM's own processes: ends them with the replica, and loads weights from the relay's segment.

    replica (AsyncLLM) ──► EngineCore (scheduler, ReplicaExecutor) ──► a Worker for each rank (SegmentLoader)

vLLM imports this module by name in its processes; nothing of a run but a path and a list of tensors reaches them.
"""

import mmap
import multiprocessing
import os

import msgspec
import torch
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # pyright: ignore[reportMissingImports]

from laminar.parent_death import die_with
from laminar.relay.manifest import TensorEntry
from laminar.rollout.engines.segment_tensors import tensors_in


class ReplicaExecutor(MultiprocExecutor):
    """vLLM's executor, in a process that ends with its replica's: vLLM's own would outlive a replica that is killed.

    Its workers end with it, which vLLM sees to.
    """

    def _init_executor(self) -> None:
        replica = multiprocessing.parent_process()
        assert replica is not None, "vLLM's scheduler runs in the replica's own process"
        assert replica.pid is not None
        die_with(replica.pid, "the replica of this engine is gone")
        super()._init_executor()


class SegmentLoader:
    """Methods that vLLM adds to the worker of every tensor-parallel rank (`worker_extension_cls`)."""

    def take_version(self, path: str, encoded_entries: bytes) -> None:
        """Overwrite this rank's weights by a published version's; on return the lease may end.

        path: the segment, as LeasedVersion has it; encoded_entries: its manifest's tensors, as msgpack. The rank reads
        the parts that it serves and no others: a tensor is a view of the mapped segment until vLLM's loader has cut
        this rank's share out of it.
        """
        entries = msgspec.msgpack.decode(encoded_entries, type=tuple[TensorEntry, ...])
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            segment = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with segment, torch.no_grad():
            self._take_tensors(segment, entries)

    def _take_tensors(self, segment: mmap.mmap, entries: tuple[TensorEntry, ...]) -> None:
        # Of vLLM's worker, which this class is mixed into.
        runner = self.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        runner.reload_weights(weights_iterator=tensors_in(segment, entries))
        if current_platform.is_cpu():
            mend_tied_head(runner.get_model())
        else:
            # Copies from pinned memory may still be under way, and the segment is about to be given back.
            torch.accelerator.synchronize()


def mend_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output head anew from the embedding that was just loaded.

    On CPU vLLM packs every matrix when the model is built; a reload packs those that are loaded, and a tied head is
    not one of them. It would go on with the embedding of the version before, and only log-probs would tell.
    """
    head, embedding = model.get_submodule("lm_head"), model.get_submodule("model.embed_tokens")
    if model.config.tie_word_embeddings and head is not embedding:  # pyright: ignore
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)  # pyright: ignore
