"""Checks the history of a run that was killed, or whose trainer was lost: what is left of it must have no seam."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

from laminar.config import Config
from laminar.control.messages import Generate, GroupId, MiniBatchTrained, PromptId, TrainerStarted, TrainMiniBatch
from laminar.observe.event_log import segments
from laminar.observe.metrics import read_metrics
from laminar.settings import CONFIG_FILE


def check_history(run_dir: Path, *, num_steps: int) -> None:
    """Raise AssertionError unless each step was made once, from prompt groups of its own, each prompt once an epoch."""
    config = Config.model_validate_json((run_dir / CONFIG_FILE).read_text())
    steps, prompt_of = surviving_steps(run_dir)
    assert list(steps) == list(range(1, num_steps + 1)), f"steps {list(steps)}"
    groups = [group for trained in steps.values() for group in trained]
    assert len(groups) == len(set(groups)), "a prompt group was trained twice"
    prompts = Counter(prompt_of[group] for group in groups)
    assert max(prompts.values()) <= config.data.num_epochs, "a prompt was trained twice in an epoch"
    if config.trainer.num_steps is None:
        assert min(prompts.values()) == config.data.num_epochs, "a prompt was left out in an epoch"
    _check_metrics(run_dir, config, num_steps)


def surviving_steps(run_dir: Path) -> tuple[dict[int, list[GroupId]], dict[GroupId, PromptId]]:
    """The prompt groups that each step trained, steps that a checkpoint did not cover in time left out; and the
    prompt of each group."""
    steps: dict[int, list[GroupId]] = {}
    in_training: dict[int, list[GroupId]] = {}
    prompt_of: dict[GroupId, PromptId] = {}
    for segment in segments(run_dir):
        for record in segment.records:
            match record.event:
                case TrainerStarted(step):
                    in_training.clear()
                    steps = {done: groups for done, groups in steps.items() if done <= step}
                case MiniBatchTrained(_, step, index):
                    trained = in_training.pop(index, [])
                    steps[step] = [*(steps.get(step, []) if index else []), *trained]
                case _:
                    pass
            for command in record.commands or ():
                if isinstance(command, TrainMiniBatch):
                    in_training[command.index] = list(dict.fromkeys(command.groups))
                elif isinstance(command, Generate) and not command.evaluation:
                    prompt_of |= {a.group: a.prompt for a in command.trajectories}
    return steps, prompt_of


def _check_metrics(run_dir: Path, config: Config, num_steps: int) -> None:
    rows = [row for row in read_metrics(run_dir) if "training/global_step" in row.values]
    assert [row.step for row in rows] == list(range(1, num_steps + 1)), f"metrics of steps {[row.step for row in rows]}"
    assert [row.values["training/global_step"] for row in rows] == [row.step for row in rows]
    times = [row.now for row in rows]
    assert times == sorted(times), "metrics go back in time"
    for row in rows:
        assert row.values["perf/total_num_tokens"], f"step {row.step} has no tokens"
        assert row.values["actor/lr"] is not None, f"step {row.step} has no learning rate"
    rates = [row.values["actor/lr"] or 0.0 for row in rows]
    if config.trainer.num_warmup_updates >= num_steps * config.batch.num_mini_batches:
        _check_rates(rates, config)
    versions = [row.values["training/version"] for row in rows]
    assert versions == sorted(versions, key=lambda version: version or 0.0), "weight versions go back"


def _check_rates(rates: list[float], config: Config) -> None:
    """In the warm-up the rate tells how many updates were made: from step to step at most one for each mini-batch."""
    trainer = config.trainer
    rise = trainer.learning_rate / trainer.num_warmup_updates * config.batch.num_mini_batches
    for before, after in pairwise(rates):
        assert -1e-12 <= after - before <= rise * (1 + 1e-6), f"the learning rate went from {before} to {after}"
