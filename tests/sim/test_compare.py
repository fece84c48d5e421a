import json
from pathlib import Path

import pytest
import yaml

from laminar.cli import main
from laminar.sim.compare import SCHEDULES
from laminar.sim.run import simulate
from tests.sim.worlds import small


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(json.loads(small().model_dump_json())))
    return path


def test_a_table_has_a_column_for_each_schedule(config_file, capsys):
    assert main(["sim", str(config_file)]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in SCHEDULES)
    assert "all 16, in turns" in shown
    assert "8 + 8" in shown
    assert "staleness at training" in shown


def test_json_is_an_object_a_line(config_file, capsys):
    chosen = "trajectory_level,one_step_stale"
    assert main(["sim", str(config_file), "--schedules", chosen, "--json", "simulation.num_train_gpus=12"]) == 0
    trajectory_level, one_step_stale = map(json.loads, capsys.readouterr().out.splitlines())
    assert (trajectory_level["schedule"], one_step_stale["schedule"]) == tuple(chosen.split(","))
    assert trajectory_level["num_replicas"] == one_step_stale["num_replicas"] == 4
    assert one_step_stale["staleness_at_train"] == {"1": 1.0}
    for shown in (trajectory_level, one_step_stale):
        assert sum(shown["staleness_at_finish"].values()) == pytest.approx(1)
        assert shown["training"] + shown["trainer_idle"] == pytest.approx(1)
        assert 0 < shown["generating"] <= 1
        assert shown["tokens_per_s"] > 0
        latency = shown["trajectory_latency_s"]
        assert latency["p50"] <= latency["p99"] <= latency["max"]


def test_a_simulated_run_is_replayed_and_reported_like_a_live_one(config_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["sim", str(config_file), "--schedules", "trajectory_level", "--out", str(out)]
    assert main(arguments) == 0
    folder = out / "trajectory_level"
    assert json.loads((folder / "summary.json").read_text())["num_steps"] == 8
    assert "A simulation: control decided as in a live run" in (folder / "report.html").read_text()
    capsys.readouterr()
    assert main(["replay", str(folder)]) == 0
    assert "identical" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "holds a simulated run of trajectory_level already" in capsys.readouterr().err


def test_lengths_of_a_run_are_those_that_it_had(tmp_path):
    """Also of a simulated one, whose lengths are 30 and 60."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30\n60\n")
    simulate(small(lengths={"kind": "file", "path": str(lengths)}), record_in=tmp_path / "run")
    again = small(lengths={"kind": "run", "path": str(tmp_path / "run")})
    assert set(simulate(again).history.lengths) == {30, 60}
