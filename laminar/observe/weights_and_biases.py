"""Sends metrics to Weights & Biases, from the driver, if the `wandb` extra is installed and a project is named."""

# The extra is not everywhere where types are checked.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

RUN_ID_FILE = "wandb_run_id"


class WandbRun:
    """One run there for one run folder: after --resume it goes on, --fresh begins another.

    Credentials and mode are wandb's own affair (`wandb login`, WANDB_MODE=offline). Raises ValueError where it is not
    installed.
    """

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb  # heavy, so only when asked for
        except ImportError as error:
            raise ValueError(
                f"observe.wandb_project={project} needs Weights & Biases; install it with `pip install "
                "'laminar-rl[wandb]'`, or unset it"
            ) from error
        id_file = run_dir / RUN_ID_FILE
        if not id_file.exists():
            id_file.write_text(token_hex(8))
        self._run: Any = wandb.init(
            project=project,
            id=id_file.read_text(),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            resume="allow",
        )
        # An evaluation is of the step of its version, which may be behind the newest one.
        self._run.define_metric("*", step_metric="training/global_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training/global_step": step})

    def undo(self, step: int) -> None:
        """What was sent cannot be taken back, so say there that later steps than this one come a second time."""
        self._run.alert(title=f"went back to step {step}", text=f"Steps after {step} are done again and logged twice.")

    def close(self) -> None:
        self._run.finish()
