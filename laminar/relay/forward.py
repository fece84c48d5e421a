"""Sends every newest version to the next relay of the chain, whoever that is at the moment.

One thread. It follows the version that is arriving (cut-through), resumes where the next relay says, reports a next
that fails once and keeps trying it with a bounded back-off until it works or another is set. The trainer's sender
process uses the same to reach the master relay.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from laminar.relay.handshake import Credentials, connect, new_link
from laminar.relay.links import Link, LinkRefused
from laminar.relay.stream import Source, Superseded, push
from laminar.relay.transport import Transport

DIAL_DEADLINE_S = 2.0
"""A relay that is there answers the handshake in milliseconds."""
BACK_OFF_MIN_S = 0.05
BACK_OFF_MAX_S = 1.0
JOIN_DEADLINE_S = 5.0

Address = tuple[str, int]
AnySource = TypeVar("AnySource", bound=Source)


class Supply(Protocol[AnySource]):
    """Where versions to send come from; `changed` guards it and is notified when there may be a new one."""

    changed: threading.Condition

    def take_newest_after(self, version: int) -> AnySource | None:
        """Called with `changed` held; the source keeps its bytes until it is put back."""
        ...

    def put_back(self, source: AnySource) -> None: ...


class Job(NamedTuple, Generic[AnySource]):
    source: AnySource
    address: Address
    epoch: int
    generation: int


class Forwarder(Generic[AnySource]):
    """on_progress(version, bytes): the next relay has got or been sent so much. on_lost(address, cause): once per
    outage. on_delivered(source, newest, seconds): the next relay has `newest` complete, at least the source's version.
    All are called from the forwarder's thread, without the lock.
    """

    def __init__(
        self,
        supply: Supply[AnySource],
        credentials: Credentials,
        transport: Transport,
        *,
        answer_deadline_s: float,
        on_progress: Callable[[int, int], None],
        on_lost: Callable[[Address, str], None],
        on_delivered: Callable[[AnySource, int, float], None],
    ) -> None:
        self.version_sending: int | None = None
        self.num_bytes_sent = 0
        self._supply = supply
        self._changed = supply.changed
        self._credentials = credentials
        self._transport = transport
        self._answer_deadline_s = answer_deadline_s
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._on_delivered = on_delivered
        self._address: Address | None = None
        self._epoch = -1
        self._generation = 0  # Of the address: a send that began under another is given up.
        self._delivered = -1  # Versions count from 0, so nothing is delivered yet.
        self._num_failures = 0
        self._next_is_lost = False
        self._retry_at = 0.0
        self._link: Link | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="laminar-relay-forward", daemon=True)
        self._thread.start()

    @property
    def next_is_lost(self) -> bool:
        """Whether the last attempt to reach the next relay failed."""
        return self._next_is_lost

    def set_next(self, address: Address | None, epoch: int) -> None:
        """Send to this relay from now on (None: to nobody). An order older than the last one is ignored.

        What is being sent to the same address goes on; to any other it is given up, and the new next relay says
        where it wants to resume.
        """
        with self._changed:
            if epoch < self._epoch:
                return
            if address != self._address:
                self._generation += 1
                self._cut_link()
            # Also for the same address: another relay may have been started there since.
            self._address, self._epoch, self._delivered = address, epoch, -1
            self._num_failures, self._retry_at, self._next_is_lost = 0, 0.0, False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._generation += 1
            self._cut_link()
            self._changed.notify_all()
        self._thread.join(JOIN_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the forwarding thread did not end within {JOIN_DEADLINE_S:g} s")

    def _run(self) -> None:
        while (job := self._wait_for_job()) is not None:
            try:
                self._attempt(job)
            finally:
                self.version_sending = None
                self._supply.put_back(job.source)

    def _wait_for_job(self) -> Job[AnySource] | None:
        with self._changed:
            while not self._closed:
                pause_s = None
                if self._address is not None:
                    pause_s = self._retry_at - time.monotonic()
                    if pause_s <= 0:
                        source = self._supply.take_newest_after(self._delivered)
                        if source is not None:
                            return Job(source, self._address, self._epoch, self._generation)
                        pause_s = None
                # Idle: close, set_next and every new version notify.
                self._changed.wait(pause_s)
            return None

    def _attempt(self, job: Job[AnySource]) -> None:
        version = job.source.manifest.version
        started = time.monotonic()
        try:
            self._send(job)
        except Superseded:
            return
        except LinkRefused as error:
            newest = error.refusal.newest_complete
            if newest is None or newest < version:
                self._failed(job, str(error))
            else:
                self._delivered_to(job, newest, started)
        except OSError as error:
            self._failed(job, str(error) or type(error).__name__)
        else:
            self._delivered_to(job, version, started)

    def _send(self, job: Job[AnySource]) -> None:
        version = job.source.manifest.version

        def still_wanted() -> bool:
            return self._generation == job.generation

        def progressed(num_bytes: int) -> None:
            self.num_bytes_sent, self._next_is_lost = num_bytes, False
            self._on_progress(version, num_bytes)

        # Known before it is connected, so that a new next does not have to wait for one that does not answer.
        link = new_link(job.address)
        try:
            with self._changed:
                if not still_wanted():
                    return
                self._link = link
            connect(link, job.address, self._credentials, DIAL_DEADLINE_S)
            self.version_sending, self.num_bytes_sent = version, 0
            push(
                link,
                job.source,
                job.epoch,
                self._transport,
                answer_deadline_s=self._answer_deadline_s,
                still_wanted=still_wanted,
                on_progress=progressed,
            )
        finally:
            with self._changed:
                self._link = None
            link.close()

    def _delivered_to(self, job: Job[AnySource], newest: int, started: float) -> None:
        with self._changed:
            if self._generation != job.generation:
                return
            self._delivered = newest
            self._num_failures, self._retry_at, self._next_is_lost = 0, 0.0, False
        self._on_delivered(job.source, newest, time.monotonic() - started)

    def _failed(self, job: Job[AnySource], cause: str) -> None:
        with self._changed:
            if self._generation != job.generation:
                return
            pause_s = min(BACK_OFF_MIN_S * 2 ** min(self._num_failures, 10), BACK_OFF_MAX_S)
            self._num_failures += 1
            self._next_is_lost = True
            self._retry_at = time.monotonic() + pause_s
            first = self._num_failures == 1
        if first:
            self._on_lost(job.address, cause)

    def _cut_link(self) -> None:
        if self._link is not None:
            self._link.shutdown()
