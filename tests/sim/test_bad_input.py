"""Whatever a user can get wrong is one message that names the setting, or the file and line, and the fix."""

import json
from pathlib import Path

import pytest

from laminar.cli import main
from laminar.sim.run import simulate
from tests.sim.worlds import small


def refused(capsys, *overrides: str) -> str:
    assert main(["sim", "configs/sim_32b_128.yaml", *overrides]) == 2
    message = capsys.readouterr().err
    assert message.startswith("laminar sim: ")
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("simulation.num_train_gpus=128", "simulation.num_train_gpus=128 leaves 0 of simulation.num_gpus=128"),
        ("simulation.num_train_gpus=62", "66 of simulation.num_gpus=128 generate, which is no multiple"),
        ("simulation.num_train_gpus=126", "so there would be no replica; lower it or simulation.num_train_gpus"),
        ("simulation.tensor_parallel=3", "generate, which is no multiple of simulation.tensor_parallel=3"),
        ("simulation.num_gpus=0", "simulation.num_gpus"),
        ("simulation.gpu_memory_share=0.2", "raise simulation.tensor_parallel or simulation.gpu_memory_share"),
        ("simulation.num_warmup_steps=15", "num_warmup_steps=15 leaves none of num_steps=15 to measure"),
        ("simulation.lengths.kind=weibull", "simulation.lengths"),
        ("simulation.lenghts.kind=file", "simulation.lengths"),
        ("simulation.training.fixed_s_per_mtoken=1", "belong together"),
    ],
)
def test_settings_that_do_not_fit(capsys, override, named):
    assert named in refused(capsys, override, "schedule.kind=trajectory_level")


def test_a_model_too_big_for_its_tensor_parallelism(capsys):
    message = refused(capsys, "simulation.model.name=qwen2.5-72b", "simulation.tensor_parallel=1")
    assert "simulation.tensor_parallel=1 h800 leave nothing for the KV cache" in message


def test_a_model_that_was_not_measured_so(capsys):
    message = refused(capsys, "simulation.model.name=qwen2.5-72b", "simulation.tensor_parallel=16")
    assert "no step times of this model with simulation.tensor_parallel=16" in message


def test_schedules_that_do_not_exist(capsys):
    assert main(["sim", "configs/sim_32b_128.yaml", "--schedules", "synchronous,fast"]) == 2
    assert "--schedules 'fast' is no schedule; choose from trajectory_level, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [("512\n-3\n", 2, "-3.0"), ("512\n\nmany\n", 3, "'many'"), ("1.5\n", 1, "1.5"), ("7\nnan\n", 2, "nan")],
)
def test_a_length_file_with_something_else_in_it(tmp_path: Path, text, line, what):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"lengths.txt, line {line}: {what} is no length in tokens; put a whole number"
    ):
        simulate(small(lengths={"kind": "file", "path": str(path)}))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[100,\n 200,\n true]", "line 3: True is no length"),
        ('{"lengths": [1]}', "line 1: not a JSON list"),
        ("[100,\n oops]", "line 2: not JSON"),
        ("[]", "is empty"),
        ("[1, 2", "not JSON"),
    ],
)
def test_a_json_list_of_lengths_with_something_else_in_it(tmp_path: Path, text, named):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        simulate(small(lengths={"kind": "file", "path": str(path)}))


def test_length_files_that_are_not_there_or_fit(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read as text"):
        simulate(small(lengths={"kind": "file", "path": str(tmp_path / "none.txt")}))
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([30, 60]))
    assert set(simulate(small(lengths={"kind": "file", "path": str(path)})).history.lengths) == {30, 60}


def test_a_run_without_lengths(tmp_path: Path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        simulate(small(lengths={"kind": "run", "path": str(tmp_path)}))
