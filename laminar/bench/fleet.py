"""Runs a relay tier without the rest of a run: a trainer, a relay on each machine, and control's rules for the chain.

The relays, the publisher and the rules (control/broadcast.py) are the real ones, each process on its own machine; only
Ray is left out, so news come up a pipe and orders go down it.
"""

import queue
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import msgspec

from laminar.bench.child import Child
from laminar.bench.emulated_transport import Emulation
from laminar.bench.machines import Machine
from laminar.config import RelayConfig
from laminar.control import broadcast
from laminar.control.messages import AnyCommand, MachineId, RelayReport, SenderReport, SetChain, VersionComplete
from laminar.control.state import ClusterState

TICK_S = 0.1
TOKEN = "6c616d696e6172"
START_DEADLINE_S = 90.0
END_DEADLINE_S = 20.0


class HandOver(msgspec.Struct, frozen=True):
    version: int
    stall_s: float
    at_s: float
    """When it was done, by the machine's monotonic clock, which all processes share."""


class Fleet:
    """machines[0] is the trainer's, the others have a relay each. Everything is up when the constructor returns."""

    def __init__(
        self,
        machines: list[Machine],
        config: RelayConfig,
        payload_bytes: int,
        *,
        emulation: Emulation | None = None,
    ) -> None:
        self.run_id = f"bench-{uuid4().hex[:12]}"
        self.chains: list[tuple[float, tuple[int, ...]]] = []
        """Every chain that was set, with its time."""
        self._completed: dict[tuple[int, int], float] = {}
        """When (machine, version) was complete."""
        self._happenings: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._news: queue.SimpleQueue[tuple[str, int, dict[str, Any] | None] | None] = queue.SimpleQueue()
        self._state = ClusterState()
        self._state.trainer.version = -1
        self.relays = {
            machine.index: Child(
                "laminar.bench.relay_process",
                machine,
                {
                    "machine": machine.index,
                    "run_id": self.run_id,
                    "token": TOKEN,
                    "config": config.model_dump(mode="json"),
                    "host": machine.host,
                    "emulation": None if emulation is None else msgspec.to_builtins(emulation),
                    "reports": True,
                },
                lambda news, index=machine.index: self._news.put(("relay", index, news)),
            )
            for machine in machines[1:]
        }
        self._start_trainer = lambda: Child(
            "laminar.bench.trainer_process",
            machines[0],
            {
                "run_id": self.run_id,
                "token": TOKEN,
                "config": config.model_dump(mode="json"),
                "payload_bytes": payload_bytes,
                "emulation": None if emulation is None else msgspec.to_builtins(emulation),
            },
            lambda news: self._news.put(("trainer", 0, news)),
        )
        self.trainer = self._start_trainer()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._thread = threading.Thread(target=self._control, name="fleet-control", daemon=True)
        self._start()

    def publish(self, version: int) -> HandOver:
        """Fill the weights anew and hand them over; returns when the trainer could go on."""
        order = {"hand_over": version, "num_relays": len(self._state.chain)}
        done = self.trainer.ask(order)
        self._news.put(("handed_over", version, None))
        return HandOver(version, done["stall_s"], done["at_s"])

    def restart_trainer(self) -> None:
        """In place of one that was killed."""
        self.trainer = self._start_trainer()
        self.trainer.started.result(START_DEADLINE_S)
        self._link(SetChain(self._state.new_command(), tuple(self._state.chain)))

    def wait_complete(self, version: int, machines: Iterable[int], deadline_s: float) -> float:
        """When the last of these machines had the version. Raises TimeoutError, naming those that have not."""
        wanted = list(machines)
        with self._changed:
            if not self._changed.wait_for(lambda: all((m, version) in self._completed for m in wanted), deadline_s):
                late = [m for m in wanted if (m, version) not in self._completed]
                raise TimeoutError(f"version {version} is not complete on machines {late} after {deadline_s:g} s")
            return max(self._completed[m, version] for m in wanted)

    def wait_bytes(self, machine: int, version: int, num_bytes: int, deadline_s: float) -> None:
        """Until a relay is in the middle of a version: it has so much of it."""

        def is_there() -> bool:
            relay = self._state.relays[MachineId(machine)]
            return relay.incoming_version == version and relay.incoming_bytes >= num_bytes

        with self._changed:
            if not self._changed.wait_for(is_there, deadline_s):
                raise TimeoutError(f"machine {machine} has not got {num_bytes} bytes of version {version}")

    def happenings(self, kind: str) -> list[dict[str, Any]]:
        with self._changed:
            return [one for one in self._happenings if one["type"] == kind]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the relays listen."""
        return list(self._addresses.values())

    @property
    def chain(self) -> list[int]:
        return [int(machine) for machine in self._state.chain]

    def close(self) -> None:
        """End every process; those that were stopped or killed too."""
        self._news.put(None)
        self._thread.join(END_DEADLINE_S)
        with ExitStack() as stack:  # One that does not end keeps none of the others from ending.
            for child in (self.trainer, *self.relays.values()):
                stack.callback(child.end)

    # ----------------------------------------------------------------------------------- the control thread, below

    def _start(self) -> None:
        for index, relay in self.relays.items():
            host, port = relay.started.result(START_DEADLINE_S)
            self._addresses[index] = (host, port)
        self.trainer.started.result(START_DEADLINE_S)
        for index in self.relays:
            self._execute(broadcast.take_in_start(self._state, MachineId(index), time.monotonic()))
        self._thread.start()

    def _control(self) -> None:
        ticked_at_s = time.monotonic()
        while True:
            try:
                news = self._news.get(timeout=max(ticked_at_s + TICK_S - time.monotonic(), 0))
            except queue.Empty:
                now = time.monotonic()
                if now - ticked_at_s > broadcast.STALL_S / 2:
                    broadcast.restart_clocks(self._state, now)
                ticked_at_s = now
                self._execute(broadcast.pass_by_stalled(self._state, now))
                continue
            if news is None:
                return
            with self._changed:
                self._take_in(*news, time.monotonic())
                self._changed.notify_all()

    def _take_in(self, source: str, index: int, news: dict[str, Any] | None, now: float) -> None:
        state, machine = self._state, MachineId(index)
        match source, news:
            case "handed_over", _:
                state.trainer.version, state.trainer.handed_over_at_s = index, now
                state.trainer.is_everywhere = False
                broadcast.note_progress(state, now)
            case "relay", None:
                if state.relays[machine].started:
                    self._execute([broadcast.leave(state, machine, now)])
            case "relay", {"type": "report", "status": status}:
                broadcast.take_in_report(
                    state,
                    RelayReport(
                        machine,
                        status["incoming_version"],
                        status["incoming_bytes"],
                        status["sending_version"],
                        status["sending_bytes"],
                        status["next_is_lost"],
                    ),
                    now,
                )
            case "relay", {"type": "VersionComplete", "version": version, "at_s": at_s}:
                self._completed[index, version] = at_s
                broadcast.take_in_complete(state, VersionComplete(machine, version), now)
            case "trainer", {"type": "sender", "status": status}:
                if status["version"] is not None:
                    report = SenderReport(status["version"], status["num_bytes"], status["master_is_lost"])
                    broadcast.take_in_sender_report(state, report, now)
            case _, {"type": _}:
                assert news is not None
                self._happenings.append(news)
            case _:
                pass

    def _execute(self, commands: Iterable[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, SetChain):
                self.chains.append((time.monotonic(), command.machines))
                self._link(command)

    def _link(self, chain: SetChain) -> None:
        addresses = [self._addresses[machine] for machine in chain.machines]
        for position, machine in enumerate(chain.machines):
            following = addresses[position + 1] if position + 1 < len(addresses) else None
            self.relays[machine].order({"set_next": following, "epoch": chain.id})
        self.trainer.order({"set_master": addresses[0] if addresses else None, "epoch": chain.id})
