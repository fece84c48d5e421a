"""Hands the trainer's weights over: one copy into warm host memory, then training goes on while they are sent.

    trainer            Publisher                      sender process                  master relay
      │ hand_over ───►   copy into a free segment
      │                  Send(slot, manifest) ──────►   checksum, stream  ──────────►   …
      ◄── stall_s ────                        ◄──────   Released(slot) once a newer one is there and this one is sent

Two segments: one is filled while the other is sent. The newest version stays in its segment until there is a newer
one, so a new master can be brought up to date at any time.

A trainer of several ranks has a publisher in each. A rank copies and sends the rows that it holds, and nothing is
gathered: the master relay puts them together (shards.py).
"""

import math
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from laminar.config import RelayConfig
from laminar.relay.chunks import CHUNK_BYTES_MAX, best_chunk_bytes
from laminar.relay.forward import Address
from laminar.relay.handshake import Credentials
from laminar.relay.happenings import SenderHappening
from laminar.relay.keeper import PublishTimeout, SenderKeeper, SenderStatus
from laminar.relay.layout import TensorForm, check_names_differ, check_same_layout, laid_out_bytes, lay_out
from laminar.relay.manifest import Manifest, Probe, TensorEntry
from laminar.relay.orders import Send
from laminar.relay.segments import Segment
from laminar.relay.shards import Body, Rows, Shard, plan_shard

if TYPE_CHECKING:
    import torch

__all__ = ["PublishTimeout", "Publisher"]

NUM_SLOTS = 2

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class Publisher:
    """The trainer's end. Its sender process starts with it and ends with it, or with the trainer's process.

    One thread publishes; `set_master`, `sender_events`, `sender_status` and `close` may come from others.
    """

    def __init__(self, run_id: str, token: bytes, config: RelayConfig, *, rank: int = 0, num_ranks: int = 1) -> None:
        if not token:
            raise ValueError("a publisher needs the run's token; with an empty one no relay would take its weights")
        if config.chunk_bytes is not None and config.chunk_bytes > CHUNK_BYTES_MAX:
            raise ValueError(f"relay.chunk_bytes={config.chunk_bytes} is more than {CHUNK_BYTES_MAX}; lower it")
        self.num_waits = 0
        """Hand-overs that had to wait for an earlier one to be sent."""
        self._config = config
        self._keeper = SenderKeeper(Credentials(run_id, token), config)
        self._forms: tuple[TensorForm, ...] = ()
        self._dtype: torch.dtype | None = None
        self._entries: tuple[TensorEntry, ...] = ()
        self._segments: list[Segment] = []
        self._targets: list[dict[str, torch.Tensor]] = []
        self._rank, self._num_ranks = rank, num_ranks
        self._rows: Mapping[str, Rows] = {}
        self._shard: Shard | None = None
        """What this rank sends; none when there is no other."""
        self._last_version = -1

    @property
    def sender_pid(self) -> int | None:
        return self._keeper.sender_pid

    def set_master(self, address: Address | None, *, epoch: int) -> None:
        """Send to this relay from now on; None: wait for another. An order with an older epoch is ignored.

        epoch: the chain's, as in Relay.set_next, counted together with it: a relay refuses a sender whose epoch is
        older than one it has heard of.
        """
        self._keeper.set_master(address, epoch)

    def prepare(
        self, tensors: NamedTensors, *, dtype: "torch.dtype", rows: Mapping[str, Rows] = MappingProxyType({})
    ) -> None:
        """Fix the layout and take the memory, warm, so that the first hand-over costs a copy only.

        rows: of each tensor that is sharded, which rows this rank holds; `tensors` has those rows. A tensor that is not
        in it is whole on every rank, and sent by rank 0.
        """
        named = list(tensors)
        forms = tuple(_form_of(name, tensor, rows.get(name)) for name, tensor in named)
        if self._forms:
            self._check_same(forms, dtype)
            return
        check_names_differ(forms)
        if not dtype.is_floating_point:
            raise ValueError(f"weights cannot be published as {dtype}; choose float32, bfloat16 or float16")
        dtypes = {name: _published_dtype(tensor, dtype) for name, tensor in named}
        self._entries = lay_out((form, _dtype_name(dtypes[form.name]), dtypes[form.name].itemsize) for form in forms)
        num_bytes = laid_out_bytes(self._entries)
        if num_bytes == 0:
            raise ValueError("there is nothing to publish: no tensor, or only empty ones")
        if self._num_ranks > 1:
            self._shard = plan_shard(
                self._entries, rows, rank=self._rank, num_ranks=self._num_ranks, whole_bytes=num_bytes
            )
            num_bytes = max(Body(self._shard).num_bytes, 1)
        self._segments = [Segment() for _ in range(NUM_SLOTS)]
        for segment in self._segments:
            segment.reserve(num_bytes)
            if any(tensor.is_cuda for _, tensor in named):
                from laminar.relay.pinning import Pinned  # Needs an accelerator.

                segment.before_close.append(Pinned(segment.view).release)
        places = _places(self._entries, rows, self._shard)
        self._targets = [_targets_in(segment, places, dtypes) for segment in self._segments]
        self._forms, self._dtype, self._rows = forms, dtype, rows
        self._keeper.add_slots(self._segments)

    def hand_over(
        self,
        tensors: NamedTensors,
        *,
        version: int,
        step: int,
        probe: Probe,
        dtype: "torch.dtype",
        num_relays: int = 1,
    ) -> float:
        """Copy the weights and return; they are sent from the copy. Returns the seconds that it took (the stall).

        dtype: what floating-point tensors are published in; the others keep theirs. num_relays: the chain's length,
        which the size of chunks depends on. It, the probe and the rest must be the same on every rank. The first call,
        or `prepare`, fixes names, dtypes and shapes: a later one that differs raises ValueError, naming the tensor,
        before anything is copied. Raises PublishTimeout if the two versions before are still being sent after
        `relay.publish_deadline_s`.
        """
        started = time.monotonic()
        named = list(tensors)
        self.prepare(named, dtype=dtype, rows=self._rows)
        if version <= self._last_version:
            raise ValueError(f"version {version} is not newer than version {self._last_version}, published before")
        slot, waited = self._keeper.take_slot(self._config.publish_deadline_s)
        self.num_waits += waited
        try:
            targets = self._targets[slot]
            for name, tensor in named:
                if (target := targets.get(name)) is not None:  # Else another rank sends it.
                    target.copy_(tensor.detach())
        except BaseException:
            self._keeper.give_back(slot)
            raise
        self._last_version = version
        self._keeper.hand_over(Send(slot, self._manifest(version, step, probe, num_relays), self._shard))
        return time.monotonic() - started

    def sender_status(self) -> SenderStatus:
        return self._keeper.status()

    def sender_events(self) -> list[SenderHappening]:
        """What became of the hand-overs since the last call: sent, superseded, refused; master lost, sender lost."""
        return self._keeper.happenings()

    def close(self) -> None:
        """End the sender process and give the memory back; a version that is being sent stops where it is."""
        self._keeper.close()
        self._targets.clear()
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _check_same(self, forms: tuple[TensorForm, ...], dtype: "torch.dtype") -> None:
        if dtype != self._dtype:
            raise ValueError(f"weights cannot be published as {dtype}: the first publish was {self._dtype}")
        check_same_layout(self._forms, forms)

    def _manifest(self, version: int, step: int, probe: Probe, num_relays: int) -> Manifest:
        num_bytes = laid_out_bytes(self._entries)
        chunk_bytes = self._config.chunk_bytes or best_chunk_bytes(
            num_bytes,
            num_relays,
            link_startup_s=self._config.link_startup_s,
            link_bytes_per_s=self._config.link_bytes_per_s,
        )
        return Manifest(version, step, num_bytes, chunk_bytes, self._entries, probe)


def _form_of(name: str, tensor: "torch.Tensor", rows: Rows | None) -> TensorForm:
    """The whole tensor's, of which this rank may hold some rows only."""
    shape = tuple(tensor.shape)
    if rows is not None:
        if not rows.shape or shape != (rows.num_rows, *rows.shape[1:]) or rows.first + rows.num_rows > rows.shape[0]:
            raise ValueError(
                f"tensor {name!r} of shape {shape} is not rows {rows.first} to {rows.first + rows.num_rows} of one of "
                f"shape {rows.shape}"
            )
        shape = rows.shape
    return TensorForm(name, _dtype_name(tensor.dtype), shape)


def _dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _published_dtype(tensor: "torch.Tensor", dtype: "torch.dtype") -> "torch.dtype":
    return dtype if tensor.dtype.is_floating_point else tensor.dtype


def _places(
    entries: tuple[TensorEntry, ...], rows: Mapping[str, Rows], shard: Shard | None
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where each tensor that this rank sends goes in its segment: (offset, shape of what it holds)."""
    if shard is None:
        return {entry.name: (entry.offset, entry.shape) for entry in entries}
    body = Body(shard)
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    for entry in entries:
        held = rows.get(entry.name)
        if held is not None and entry.num_bytes:
            start = entry.offset + held.first * (entry.num_bytes // entry.shape[0])
            places[entry.name] = (body.num_bytes_below(start), (held.num_rows, *entry.shape[1:]))
        elif held is None and shard.rank == 0:
            places[entry.name] = (body.num_bytes_below(entry.offset), entry.shape)
    return places


def _targets_in(
    segment: Segment, places: Mapping[str, tuple[int, tuple[int, ...]]], dtypes: "Mapping[str, torch.dtype]"
) -> "dict[str, torch.Tensor]":
    """The segment seen as tensors, made once so that a hand-over does nothing but copy."""
    import torch  # Heavy, and only the trainer has it.

    targets: dict[str, torch.Tensor] = {}
    for name, (offset, shape) in places.items():
        count = math.prod(shape)
        if count == 0:
            targets[name] = torch.empty(shape, dtype=dtypes[name])
        else:
            targets[name] = torch.frombuffer(segment.view, dtype=dtypes[name], count=count, offset=offset).view(shape)
    return targets
