from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from laminar.observe.tensorboard import ScalarFile


def test_tensorboard_reads_back_every_value_at_its_step(tmp_path: Path):
    file = ScalarFile(tmp_path)
    file.write(1, {"actor/lr": 1e-6, "b": 2.0})
    file.write(300, {"actor/lr": -2.5})
    file.close()
    (path,) = tmp_path.iterdir()
    read = [
        (event.step, {v.tag: v.tensor.float_val[0] for v in event.summary.value})
        for event in EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]
    assert read == [(1, {"actor/lr": pytest.approx(1e-6), "b": 2.0}), (300, {"actor/lr": -2.5})]
