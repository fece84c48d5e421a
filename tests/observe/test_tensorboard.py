import struct
from pathlib import Path

import pytest

from laminar.observe.tensorboard import ScalarFile, scalar_event

FILE_VERSION = bytes.fromhex("1a0d627261696e2e4576656e743a32")
KNOWN_EVENT = bytes.fromhex("09000000000000f83f10ac022a0c0a0a0a0361" + "2f6215" + "0000003f")
"""wall_time 1.5, step 300, summary { value { tag "a/b", simple_value 0.5 } }"""


def records(path: Path) -> list[bytes]:
    data, found = path.read_bytes(), list[bytes]()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_an_event_is_what_the_protobuf_says():
    assert scalar_event(1.5, 300, {"a/b": 0.5}) == KNOWN_EVENT


def test_a_file_opens_with_its_version_and_holds_an_event_a_step(tmp_path: Path):
    file = ScalarFile(tmp_path)
    file.write(1, {"a": 1.0, "b": 2.0})
    file.write(2, {"a": 3.0})
    file.close()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    version, first, second = records(path)
    assert version.endswith(FILE_VERSION)
    assert first.count(b"\x0a\x01a\x15") == first.count(b"\x0a\x01b\x15") == 1
    assert struct.pack("<f", 3.0) in second


def test_another_library_reads_every_value_and_checksum(tmp_path: Path):
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    long_name = "training/off_policy/trajectory_staleness_at_finish/mean" * 4
    file = ScalarFile(tmp_path / "ours")
    for step in (0, 1, 127, 128, 123456789):
        file.write(step, {"actor/lr": 1e-6, long_name: -2.5})
    file.close()
    (path,) = (tmp_path / "ours").iterdir()
    written = records(path)
    theirs = record_writer.RecordWriter(str(tmp_path / "theirs"))
    for data in written:
        theirs.write(data)
    theirs.close()
    assert (tmp_path / "theirs").read_bytes() == path.read_bytes()
    events = [event_pb2.Event.FromString(data) for data in written]
    assert events[0].file_version == "brain.Event:2"
    assert [event.step for event in events[1:]] == [0, 1, 127, 128, 123456789]
    for event in events[1:]:
        values = {value.tag: value.simple_value for value in event.summary.value}
        assert values == {"actor/lr": pytest.approx(1e-6), long_name: -2.5}
