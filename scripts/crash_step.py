"""Records what a killed run held, and trains the step after its checkpoint again, to compare it bit for bit."""

import shutil
from pathlib import Path

import torch

from laminar.cluster.payload import Payload
from laminar.config import Config
from laminar.control.messages import TrainerStarted, TrainMiniBatch
from laminar.control.recovery import recover
from laminar.observe.event_log import newest_segment
from laminar.observe.replay import restore
from laminar.run import JOURNAL_FILE, load_data
from laminar.settings import CONFIG_FILE
from laminar.train.checkpoint import CHECKPOINTS_FOLDER, list_complete
from laminar.train.trainer import Trainer


class RecordedStep:
    """A copy of journal and event log, taken after a kill and before the start that resumes."""

    def __init__(self, run_dir: Path, copy: Path) -> None:
        self._run_dir = run_dir
        self._copy = copy
        copy.mkdir()
        shutil.copytree(run_dir / "events", copy / "events")
        for path in run_dir.glob(f"{JOURNAL_FILE}*"):
            shutil.copy(path, copy / path.name)

    def restored_step(self) -> int:
        """What the start after the kill restored; its checksums were compared then, or it would not have started."""
        return next(r.event.step for r in newest_segment(self._run_dir).records if isinstance(r.event, TrainerStarted))

    def same_again(self) -> bool | None:
        """Whether the checkpoint after the restored one is what we come to; none if it, or responses, are missing."""
        step = self.restored_step()
        folders = {c.step: c.folder for c in list_complete(self._run_dir / CHECKPOINTS_FOLDER)}
        if step + 1 not in folders:
            return None
        orders = self._orders(step + 1)
        config = Config.model_validate_json((self._run_dir / CONFIG_FILE).read_text())
        payload = self._payload(config, step)
        try:
            fed = [(order, payload.experiences(order)) for order in orders]
        except KeyError:
            return None  # Some responses were finished after the kill.
        finally:
            payload.close()
        torch.set_num_threads(1)
        ours, theirs = Trainer(config), Trainer(config)
        if step > 0:
            ours.restore(folders[step])
        for order, experiences in fed:
            ours.train_mini_batch(order.step, order.index, experiences)
        theirs.restore(folders[step + 1])
        got, expected = ours.state(), theirs.state()
        return all(torch.equal(got[name], expected[name]) for name in expected)

    def _orders(self, step: int) -> list[TrainMiniBatch]:
        """The step's mini-batches, as the resumed start ordered them."""
        commands = (c for record in newest_segment(self._run_dir).records for c in record.commands or ())
        return [c for c in commands if isinstance(c, TrainMiniBatch) and c.step == step]

    def _payload(self, config: Config, step: int) -> Payload:
        state = restore(self._copy).state
        recover(state, step=step)
        prompts, heldout = load_data(config)
        payload = Payload(self._copy / JOURNAL_FILE, prompts, heldout, config.seed)
        payload.restore(state)
        return payload
