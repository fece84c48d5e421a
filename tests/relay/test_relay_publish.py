"""The trainer's end: layout, hand-over, a sender that is replaced, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from laminar.config import RelayConfig
from laminar.relay.chunks import CHUNK_BYTES_MAX
from laminar.relay.happenings import MasterLost, SenderLost, SendRefused, SendSuperseded, VersionSent
from laminar.relay.lease import lease
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher, PublishTimeout
from tests.relay.relay_machines import DEADLINE_S, ROOT, TOKEN, LocalRelay, wait_until

PROBE = Probe((1, 2, 3), (-0.5, -0.25), 1e-4)
StartRelay = Callable[..., LocalRelay]
StartPublisher = Callable[..., Publisher]


@pytest.fixture
def start_publisher(run_id: str) -> Iterator[StartPublisher]:
    torch.set_num_threads(1)
    started: list[Publisher] = []

    def start(config: RelayConfig | None = None) -> Publisher:
        started.append(Publisher(run_id, TOKEN, config or RelayConfig()))
        return started[-1]

    yield start
    pids = [publisher.sender_pid for publisher in started]
    for publisher in started:
        publisher.close()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


def model(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed.weight", torch.full((7, 5), value, requires_grad=True)),
        ("scale", torch.tensor(value)),
        ("none", torch.empty(0, 3)),
        ("norm.weight", torch.arange(33.0) * value),
        ("steps", torch.tensor([3, 4], dtype=torch.int64)),
    ]


def hand_over(publisher: Publisher, version: int, tensors=None, dtype: torch.dtype = torch.float32) -> float:
    tensors = model(float(version)) if tensors is None else tensors
    return publisher.hand_over(tensors, version=version, step=version + 100, probe=PROBE, dtype=dtype)


class Told:
    """Collects a publisher's sender events."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.all: list[Any] = []

    def wait(self, kind: type) -> Any:
        def find() -> Any:
            self.all += self.publisher.sender_events()
            return next((one for one in self.all if type(one) is kind), None)

        return wait_until(f"{kind.__name__} from the sender", find)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_as_published(
    start_relay: StartRelay, start_publisher: StartPublisher, run_id: str, dtype: torch.dtype
):
    relay, publisher = start_relay(), start_publisher()
    publisher.set_master(relay.address, epoch=1)
    stall_s = hand_over(publisher, 1, dtype=dtype)
    assert 0 < stall_s < 5
    relay.wait_complete(1)
    assert Told(publisher).wait(VersionSent).version == 1
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        manifest = leased.manifest
        assert (manifest.version, manifest.step, manifest.probe) == (1, 101, PROBE)
        assert [entry.name for entry in manifest.tensors] == [name for name, _ in model()]
        for entry, (_, tensor) in zip(manifest.tensors, model(), strict=True):
            assert entry.offset % 64 == 0
            published = dtype if tensor.dtype == torch.float32 else tensor.dtype
            assert entry.dtype == str(published).removeprefix("torch.")
            bits = bytearray(leased.data[entry.offset : entry.offset + entry.num_bytes])
            if bits:
                assert torch.equal(torch.frombuffer(bits, dtype=published).view(entry.shape), tensor.to(published))


def renamed(tensors):
    return [("other.weight" if name == "norm.weight" else name, tensor) for name, tensor in tensors]


def reshaped(tensors):
    return [(name, tensor.T if name == "embed.weight" else tensor) for name, tensor in tensors]


def retyped(tensors):
    return [(name, tensor.double() if name == "scale" else tensor) for name, tensor in tensors]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda tensors: tensors[1:], "tensor 'embed.weight' is missing"),
        (lambda tensors: [*tensors, ("lm_head.weight", torch.ones(1))], "tensor 'lm_head.weight' was not in the first"),
        (lambda tensors: [*tensors, tensors[0]], "tensor 'embed.weight' is given twice"),
        (renamed, "'other.weight' was not in the first publish and 'norm.weight' is missing now: was it renamed"),
        (reshaped, r"tensor 'embed.weight' has shape \(5, 7\); it was published with \(7, 5\) first"),
        (retyped, "tensor 'scale' is float64; it was published from float32 first"),
    ],
)
def test_publish_with_another_layout_fails_before_anything_is_sent(
    start_relay: StartRelay, start_publisher: StartPublisher, spoil, complaint: str
):
    relay, publisher = start_relay(), start_publisher()
    publisher.set_master(relay.address, epoch=1)
    hand_over(publisher, 1)
    relay.wait_complete(1)
    with pytest.raises(ValueError, match=complaint):
        hand_over(publisher, 2, spoil(model()))
    hand_over(publisher, 3, list(reversed(model(3.0))))  # Another order is the same layout.
    relay.wait_complete(3)
    assert relay.relay.status().versions == (1, 3)


def test_mistakes_of_the_first_publish_are_named(start_publisher: StartPublisher):
    publisher = start_publisher()
    with pytest.raises(ValueError, match="nothing to publish"):
        hand_over(publisher, 1, [("none", torch.empty(0))])
    with pytest.raises(ValueError, match=r"cannot be published as torch\.int8"):
        hand_over(publisher, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="tensor 'a' is given twice"):
        hand_over(publisher, 1, [("a", torch.ones(1)), ("a", torch.ones(1))])
    hand_over(publisher, 1)
    with pytest.raises(ValueError, match=r"the first publish was torch\.float32"):
        hand_over(publisher, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="version 1 is not newer than version 1"):
        hand_over(publisher, 1)


def test_settings_that_cannot_be_are_named(run_id: str):
    with pytest.raises(ValueError, match=f"relay.chunk_bytes={CHUNK_BYTES_MAX + 1} is more than"):
        Publisher(run_id, TOKEN, RelayConfig(chunk_bytes=CHUNK_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="needs the run's token"):
        Publisher(run_id, b"", RelayConfig())


def test_two_publishes_in_quick_succession_end_with_the_newest(
    start_relay: StartRelay, start_publisher: StartPublisher, run_id: str
):
    relays = [start_relay(0), start_relay(1)]
    relays[0].relay.set_next(relays[1].address, 1)
    publisher = start_publisher(RelayConfig(chunk_bytes=4096))
    publisher.set_master(relays[0].address, epoch=1)
    for version in (1, 2):
        hand_over(publisher, version, [("w", torch.full((1 << 18,), float(version)))])
    for relay in relays:
        relay.wait_complete(2)
        with lease(run_id, relay.relay.machine, TOKEN, None, 5.0) as leased:
            assert leased.manifest.version == 2
            assert set(memoryview(leased.data).cast("f")) == {2.0}


def test_master_set_late_or_changed_gets_the_newest(start_relay: StartRelay, start_publisher: StartPublisher):
    publisher = start_publisher()
    told = Told(publisher)
    hand_over(publisher, 1)
    hand_over(publisher, 2)
    assert told.wait(SendSuperseded) == SendSuperseded(version=1, by=2)
    first, second = start_relay(0), start_relay(1)
    publisher.set_master(first.address, epoch=1)
    first.wait_complete(2)
    publisher.set_master(second.address, epoch=2)
    second.wait_complete(2)
    publisher.set_master(first.address, epoch=1)  # An order that comes late changes nothing.
    hand_over(publisher, 3)
    second.wait_complete(3)
    assert first.relay.status().versions == (2,)


def test_lost_master_is_told_and_training_goes_on(start_relay: StartRelay, start_publisher: StartPublisher):
    publisher = start_publisher(RelayConfig(publish_deadline_s=5.0))
    gone = start_relay(0)
    publisher.set_master(gone.address, epoch=1)
    gone.relay.close()
    told = Told(publisher)
    for version in range(1, 6):
        assert hand_over(publisher, version) < 3
    assert told.wait(MasterLost).address == gone.address
    back = start_relay(1)
    publisher.set_master(back.address, epoch=2)
    back.wait_complete(5)


def test_version_behind_the_runs_is_refused_by_name(start_relay: StartRelay, start_publisher: StartPublisher):
    relay = start_relay()
    ahead, behind = start_publisher(), start_publisher()
    for publisher in (ahead, behind):
        publisher.set_master(relay.address, epoch=1)
    hand_over(ahead, 7)
    relay.wait_complete(7)
    hand_over(behind, 3)
    assert "not newer than the master relay's 7" in Told(behind).wait(SendRefused).cause


def test_hung_sender_is_a_named_error_not_a_hang(start_relay: StartRelay, start_publisher: StartPublisher):
    relay = start_relay()
    publisher = start_publisher(RelayConfig(publish_deadline_s=0.5))
    publisher.set_master(relay.address, epoch=1)
    hand_over(publisher, 1)
    relay.wait_complete(1)
    Told(publisher).wait(VersionSent)
    assert publisher.sender_pid is not None
    os.kill(publisher.sender_pid, signal.SIGSTOP)
    hand_over(publisher, 2)
    with pytest.raises(PublishTimeout, match=r"versions 1 and 2 are still being sent .*publish_deadline_s=0.5 s"):
        hand_over(publisher, 3)
    os.kill(publisher.sender_pid, signal.SIGCONT)
    hand_over(publisher, 4)
    relay.wait_complete(4)


def test_killed_sender_is_replaced_and_the_newest_still_arrives(
    start_relay: StartRelay, start_publisher: StartPublisher
):
    relay, publisher = start_relay(), start_publisher()
    told = Told(publisher)
    hand_over(publisher, 1)
    wait_until("the sender", lambda: publisher.sender_pid)
    os.kill(publisher.sender_pid or 0, signal.SIGKILL)
    lost = told.wait(SenderLost)
    assert lost == SenderLost(cause="signal 9", restarted=True)
    publisher.set_master(relay.address, epoch=1)
    relay.wait_complete(1)
    hand_over(publisher, 2)
    relay.wait_complete(2)


def test_sender_that_dies_again_and_again_is_a_named_error(start_publisher: StartPublisher):
    publisher = start_publisher()
    told = Told(publisher)
    for num_lost in range(1, 5):
        pid = wait_until("a sender", lambda: publisher.sender_pid)
        os.kill(pid, signal.SIGKILL)

        def all_lost(num_lost: int = num_lost) -> bool:
            told.all += publisher.sender_events()
            return len(told.all) >= num_lost

        wait_until("the loss", all_lost)
        wait_until("another or none", lambda pid=pid, n=num_lost: publisher.sender_pid != pid or n == 4)
    assert [one.restarted for one in told.all] == [True, True, True, False]
    with pytest.raises(RuntimeError, match="the sender process died 4 times, the last time with signal 9"):
        hand_over(publisher, 1)


TRAINER = """
import sys, time, torch
from laminar.config import RelayConfig
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
publisher = Publisher(sys.argv[1], bytes.fromhex(sys.argv[2]), RelayConfig())
publisher.set_master((sys.argv[3], int(sys.argv[4])), epoch=1)
publisher.hand_over([("w", torch.ones(4))], version=1, step=1, probe=Probe((), (), 1e-4), dtype=torch.float32)
while not publisher.sender_events():
    time.sleep(0.01)
print(publisher.sender_pid, flush=True)
sys.stdin.read()
"""


def test_no_sender_stays_after_its_trainer_was_killed(start_relay: StartRelay, run_id: str):
    host, port = start_relay().address
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, run_id, TOKEN.hex(), host, str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as trainer:
        assert trainer.stdout is not None
        sender = psutil.Process(int(trainer.stdout.readline()))
        assert "laminar.relay.sender" in sender.cmdline()
        assert TOKEN.hex() not in " ".join(sender.cmdline())
        trainer.kill()
        wait_until("the sender's end", lambda: not sender.is_running() or sender.status() == psutil.STATUS_ZOMBIE)


def test_sender_started_for_a_dead_trainer_ends_by_itself():
    done = subprocess.run(
        [sys.executable, "-m", "laminar.relay.sender", "0", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if os.getpid() != 1:
        assert "the publisher was gone before its sender started" in done.stderr


def test_nothing_is_left_in_shared_memory(start_relay: StartRelay, start_publisher: StartPublisher):
    before = set(Path("/dev/shm").iterdir())
    relay, publisher = start_relay(), start_publisher()
    publisher.set_master(relay.address, epoch=1)
    hand_over(publisher, 1)
    relay.wait_complete(1)
    assert set(Path("/dev/shm").iterdir()) <= before
