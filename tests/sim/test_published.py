"""The published experiments: how they are set up, how ours are judged, and that the constants are those fitted."""

import json

import msgspec
import pytest

from laminar.cli import main
from laminar.sim.calibrate import with_step
from laminar.sim.calibration import calibration
from laminar.sim.published import published
from laminar.sim.reproduce import Reproduced, efficiencies, order, reproduce_cell, verdict
from laminar.sim.run import shape_of
from laminar.sim.series import FITTED, SERIES, calibration_of, cells, config_of


def cell(schedule: str, num_gpus: int, series: str = "32B_math"):
    return next(c for c in cells(series) if (c.schedule, c.num_gpus) == (schedule, num_gpus))


def as_published(series: str) -> list[Reproduced]:
    return [
        Reproduced(c.series, c.schedule, c.num_gpus, c.published_tokens_per_s, c.published_tokens_per_s, 0.0, c.fitted)
        for c in cells(series)
    ]


def test_there_are_75_cells_and_every_one_fits_its_gpus():
    found = [c for series in SERIES for c in cells(series)]
    assert len(found) == 75
    for c in found:
        shape = shape_of(config_of(c), calibration_of(c, calibration()))
        assert shape.split.num_rollout_gpus == shape.num_replicas * config_of(c).simulation.tensor_parallel
        if c.schedule != "synchronous":
            assert shape.split.num_train_gpus + shape.split.num_rollout_gpus == c.num_gpus


def test_splits_and_tensor_parallelism_are_the_papers():
    """Table 2 and appendix A.2."""
    assert shape_of(config_of(cell("one_step_stale", 512))).split.num_train_gpus == 80
    assert shape_of(config_of(cell("trajectory_level", 1024, "72B_math"))).num_replicas == 32
    assert shape_of(config_of(cell("trajectory_level", 64, "7B_math"))).num_replicas == 24
    assert shape_of(config_of(cell("streaming", 64, "7B_math"))).num_replicas == 24
    assert shape_of(config_of(cell("synchronous", 128))).split.colocated


def test_efficiencies_of_the_published_series_are_those_it_states():
    shares = {schedule: round(100 * ours, 1) for schedule, (ours, _) in efficiencies(as_published("32B_math")).items()}
    assert shares == {
        "synchronous": 17.9,
        "one_step_stale": 25.5,
        "streaming": 22.5,
        "partial_rollout": 39.2,
        "trajectory_level": 68.2,
    }


def test_order_counts_only_systems_that_are_apart():
    found = as_published("32B_math")
    right, wrong = order(found)
    assert wrong == []
    assert 30 < right < 50
    worst = [msgspec.structs.replace(one, ours_tokens_per_s=1 / one.published_tokens_per_s) for one in found]
    assert (order(worst)[0], len(order(worst)[1])) == (0, right)


def test_the_verdict_leaves_out_what_was_fitted():
    found = [
        Reproduced("32B_math", "synchronous", 32, 200.0, 100.0, 1.0, True),
        Reproduced("32B_math", "synchronous", 64, 120.0, 100.0, 0.2, False),
        Reproduced("32B_math", "streaming", 64, 60.0, 100.0, -0.4, False),
    ]
    first, *_ = verdict(found)
    assert first.endswith("mean absolute error 30.0% over 2; 2 beyond 15%, 1 beyond 25%")


def test_only_named_cells_are_fitted():
    assert {(c.series, c.schedule, c.num_gpus) for s in SERIES for c in cells(s) if c.fitted} == set(FITTED)


def test_the_engines_constants_keep_the_step_that_they_were_fitted_to():
    fitted = calibration()
    again = with_step(fitted, fitted.engine_per_layer_s)
    assert again.engine_per_running_s == pytest.approx(fitted.engine_per_running_s, rel=1e-6)
    assert fitted.engine_per_running_s > 0


def test_the_own_trainer_is_partial_rollouts_alone():
    fitted = calibration()
    own = calibration_of(cell("partial_rollout", 64), fitted)
    assert own.train_gpu_s_per_mtoken == fitted.own_train_gpu_s_per_mtoken
    assert calibration_of(cell("streaming", 64), fitted) == fitted


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_stale"])
def test_fitted_cells_come_out_as_published(schedule):
    assert abs(reproduce_cell(cell(schedule, 512)).error) < 0.03


def test_no_such_series(capsys):
    assert main(["sim", "--published", "13B_math"]) == 2
    assert "--published '13B_math' is no series; choose from 7B_math, 32B_math, 72B_math" in capsys.readouterr().err
    assert main(["sim", "configs/sim_32b_128.yaml", "--published", "32B_math"]) == 2
    assert main(["sim"]) == 2
    assert "name a CONFIG" in capsys.readouterr().err


def test_the_published_data_names_its_source():
    assert "2510.12633" in published().source
    assert json.loads(msgspec.json.encode(published()))["repack_32b_128"]["overhead_s"] == 0.69
