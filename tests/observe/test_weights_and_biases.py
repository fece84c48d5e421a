import sys

import pytest

from laminar.observe.weights_and_biases import RUN_ID_FILE, WandbRun


def test_without_the_extra_one_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does with a package that is not there
    with pytest.raises(ValueError, match=r"observe.wandb_project=p needs .*pip install 'laminar-rl\[wandb\]'"):
        WandbRun("p", tmp_path, {})


def test_values_arrive_at_their_steps_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="Weights & Biases comes with an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    first = WandbRun("laminar-test", tmp_path, {"seed": 7})
    first.write(2, {"actor/lr": 0.5})
    first.write(1, {"val-core/heldout/pass@1": 0.25})
    summary = dict(first._run.summary)
    first.close()
    assert summary["actor/lr"] == 0.5 and summary["val-core/heldout/pass@1"] == 0.25
    run_id = (tmp_path / RUN_ID_FILE).read_text()
    again = WandbRun("laminar-test", tmp_path, {"seed": 7})
    assert again._run.id == run_id
    again.close()
