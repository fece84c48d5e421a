"""Writes a checkpoint as a Hugging Face folder that AutoModelForCausalLM and inference engines load."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from laminar.settings import CONFIG_FILE
from laminar.train.checkpoint import CHECKPOINTS_FOLDER, newest_complete
from laminar.train.model import load_model
from laminar.train.ranks import ALONE
from laminar.train.sharded_state import read_state
from laminar.train.trainer import WEIGHT

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files taken over from the original model byte for byte: writing a tokenizer anew may change it."""


def export_hf(checkpoint: Path, model_path: Path, folder_out: Path) -> None:
    """Weights of `checkpoint` (a folder that Trainer.save wrote), the rest from the model that training began with.

    The weights get the dtype that the original's config names (bfloat16, mostly), as safetensors. The export is whole
    or not there. Raises ValueError for a folder that is no checkpoint or a damaged one, and for an output that exists.
    """
    if folder_out.exists() and any(folder_out.iterdir()):
        raise ValueError(f"{folder_out} is not empty; name a new folder for the export")
    model: Any = load_model(model_path)  # transformers types `to` as taking no dtype
    read_state(checkpoint, {WEIGHT + name: weight.detach() for name, weight in model.named_parameters()}, ALONE)
    dtype = AutoConfig.from_pretrained(model_path, local_files_only=True).dtype or torch.float32
    unfinished = folder_out.with_name(folder_out.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(dtype).save_pretrained(unfinished)
    for name in COPIED:
        if (model_path / name).is_file():
            shutil.copyfile(model_path / name, unfinished / name)
    unfinished.rename(folder_out)


def export_checkpoint(run_dir: Path, folder_out: Path) -> None:
    """Export a run's newest complete checkpoint. Raises ValueError for a folder that holds none."""
    checkpoint = newest_complete(run_dir / CHECKPOINTS_FOLDER)
    if checkpoint is None:
        raise ValueError(f"{run_dir} holds no complete checkpoint; name the folder that a run wrote (its run_dir)")
    export_hf(checkpoint.folder, _model_path(run_dir), folder_out)


def _model_path(run_dir: Path) -> Path:
    """The model that the run began with, by the configuration saved beside its checkpoints."""
    return Path(json.loads((run_dir / CONFIG_FILE).read_text())["model"]["path"])
