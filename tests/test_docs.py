"""The documents are true where a machine can tell: generated pages, links, commands, settings, metrics, examples."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.cli import main
from laminar.data.datasets import load_prompts
from laminar.data.records import Prompt, Task
from laminar.data.tokens import text_decoder, text_encoder
from laminar.envs.env import load_environment, observe
from laminar.envs.reward_worker import load_compute_score
from laminar.observe.metric_names import TOPICS, is_listed
from laminar.rollout.engines.engine import Delta
from laminar.rollout.episode import Episode, EpisodeRules, EpisodeState
from laminar.settings import all_settings, load_config
from scripts.generate_docs import pages

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FOR_USERS = (
    "README",
    "schedules",
    "faults",
    "weights",
    "add-an-environment",
    "data-and-rewards",
    "losses",
    "troubleshooting",
)
WARM = ROOT / "examples/iterate/warm"
STOP = "<|im_end|>"

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTIONS = sorted({setting.name.partition(".")[0] for setting in all_settings() if "." in setting.name})
SETTING = re.compile(rf"(?<![\w./])(?:{'|'.join(SECTIONS)})\.[\w.]+")
FILE_ENDINGS = (".py", ".md", ".json", ".jsonl", ".parquet", ".yaml")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(path.read_text()) if found == language]


def spans(path: Path) -> list[str]:
    """What stands between backticks, fenced blocks left out."""
    return SPAN.findall(BLOCK.sub("", path.read_text()))


def code(path: Path) -> list[str]:
    """All that a reader may type: spans, and lines of blocks without a language."""
    return [*spans(path), *"\n".join(blocks(path, "")).replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", pages())
def test_a_generated_page_is_up_to_date(page: str):
    assert (ROOT / page).read_text() == pages()[page], "run: make docs"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_relative_link_leads_somewhere(path: Path):
    links = [link for link in LINK.findall(BLOCK.sub("", path.read_text())) if "://" not in link]
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_file_that_is_named_exists(path: Path):
    folders = ("laminar/", "tests/", "docs/", "scripts/", "configs/", "examples/", ".ci/")
    named = [span for span in spans(path) if span.startswith(folders) and not re.search(r"[\s*<…]", span)]
    assert [span for span in named if not is_there(span)] == []


def is_there(span: str) -> bool:
    """A file, a folder, or a test as pytest names it."""
    file, _, test = span.partition("::")
    return (ROOT / file).exists() and (not test or f"def {test}(" in (ROOT / file).read_text())


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_command_that_is_named_exists(path: Path, capsys: pytest.CaptureFixture[str]):
    typed = "\n".join(code(path))
    commands = set(re.findall(r"^(?:\.venv/bin/)?laminar ([a-z]+)", typed, re.MULTILINE))
    targets = set(re.findall(r"^make ([a-z-]+)", typed, re.MULTILINE))
    choices = "".join(re.findall(r"\{(.*?)\}", help_of("", capsys))[:1])
    assert commands <= set(choices.split(","))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    options = {
        option for line in typed.splitlines() if "laminar run " in line for option in re.findall(r"--\w[\w-]*", line)
    }
    assert options <= set(re.findall(r"--\w[\w-]*", help_of("run", capsys)))


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.stem in FOR_USERS], ids=name)
def test_every_setting_that_is_named_exists(path: Path):
    known = {setting.name for setting in all_settings()}
    named = {found.rstrip(".") for text in code(path) for found in SETTING.findall(text)}
    assert {n for n in named if n not in known and not n.endswith(FILE_ENDINGS)} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_metric_that_is_named_exists(path: Path):
    families = {metric.name.partition("/")[0] for topic in TOPICS for metric in topic.metrics}
    named = [span for span in spans(path) if span.partition("/")[0] in families and re.fullmatch(r"[\w/*-]+", span)]
    assert [n for n in named if "/" in n and not is_metric(n)] == []


def is_metric(named: str) -> bool:
    """A metric, or with `/*` at its end some that begin like it."""
    names = [metric.name for topic in TOPICS for metric in topic.metrics]
    return is_listed(named) or (named.endswith("/*") and any(n.startswith(named.removesuffix("*")) for n in names))


def test_the_readme_opens_with_one_sentence_one_picture_and_the_two_commands():
    text = (ROOT / "README.md").read_text()
    title, sentence, picture = text.split("\n\n")[:3]
    assert title == "# Laminar"
    assert sentence.count(".") == 1
    assert picture.startswith("![")
    assert text.count("![") == 1
    assert [line.partition("  ")[0] for line in blocks(ROOT / "README.md", "")[0].splitlines()] == [
        "make quickstart",
        "make test",
    ]


def test_the_readme_s_configuration_is_one(tmp_path: Path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "my_run.yaml").write_text(text)
    config = load_config(tmp_path / "my_run.yaml")
    assert config.reward.function == "my_reward.py:compute_score"


def test_the_reward_function_of_the_documents_scores(tmp_path: Path):
    (text,) = blocks(ROOT / "docs/data-and-rewards.md", "python")
    (tmp_path / "reward.py").write_text(text)
    compute_score = load_compute_score(f"{tmp_path}/reward.py:compute_score")
    assert [compute_score("sums", text, "4") for text in ("so it is 4", "so it is 5")] == [1.0, 0.0]


def test_the_row_of_the_documents_is_read(tmp_path: Path):
    (text,) = blocks(ROOT / "docs/data-and-rewards.md", "json")
    (tmp_path / "rows.jsonl").write_text(text)
    loaded = load_prompts([tmp_path / "rows.jsonl"], encode=lambda _: (1, 2), prompt_tokens_max=9)
    assert loaded.prompts[0].ground_truth == "4"


# ------------------------------------------------------------------------------- the example of add-an-environment.md


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with second_try.py and the data that it wrote."""
    (text,) = blocks(ROOT / "docs/add-an-environment.md", "python")
    (tmp_path / "second_try.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "second_try.py"], cwd=tmp_path, env=environment, check=True, timeout=60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prompts(example: Path) -> tuple[Prompt, ...]:
    def encode(prompt: object) -> list[int]:
        assert isinstance(prompt, str)
        return text_encoder(WARM)(prompt)

    return load_prompts([example / "second_try.jsonl"], encode=encode, prompt_tokens_max=32).prompts


def overrides_of_the_example() -> Iterator[str]:
    (typed,) = [text for text in blocks(ROOT / "docs/add-an-environment.md", "") if "laminar run" in text]
    for word in shlex.split(typed.replace("\\\n", " ")):
        if "=" in word:
            yield word


@pytest.mark.usefixtures("example")
def test_the_example_s_command_is_a_configuration_that_fits_its_data(prompts: tuple[Prompt, ...]):
    config = load_config(ROOT / "configs/quickstart.yaml", list(overrides_of_the_example()))
    assert config.rollout.environment == "second_try.py:SecondTry"
    assert config.rollout.num_turns_max == 2
    assert len(prompts) >= 10 * config.batch.num_prompts_per_step


@pytest.mark.parametrize(
    ("first", "second", "score"), [("right", None, 1.0), ("wrong", "right", 0.5), ("none", "wrong", 0.0)]
)
def test_the_example_leads_an_episode_through_both_tries(
    example: Path, prompts: tuple[Prompt, ...], first: str, second: str | None, score: float
):
    prompt, encode = prompts[0], text_encoder(WARM)
    environment = load_environment(f"{example}/second_try.py:SecondTry")
    rules = EpisodeRules(response_tokens_max=320, stop_token_ids=tuple(encode(STOP)), num_turns_max=2)
    episode = Episode(Task(0, 0, prompt, (), (), seed=0), rules, version=0)  # pyright: ignore[reportArgumentType]
    written = {"right": f"Answer: {prompt.ground_truth}", "wrong": "Answer: x", "none": "I do not know"}

    decode_turn(episode, written[first])
    assert episode.state is EpisodeState.TURN_ENDED
    turn = episode.turn(text_decoder(WARM, skip_special_tokens=False))
    answer = asyncio.run(observe(environment, turn, timeout_s=5))
    assert (answer.text if answer else None) == (None if second is None else prompt.extra_info["prompt"])
    episode.observe(None if answer is None else encode(answer.text))
    if second is not None:
        decode_turn(episode, written[second])

    assert episode.state is EpisodeState.FINISHED
    assert not episode.truncated
    (tokens,) = episode.take_unreported()
    unsampled = [token for token, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if not mask]
    assert unsampled == ([] if second is None else list(prompt.token_ids))
    compute_score = load_compute_score(f"{example}/second_try.py:SecondTry")
    solution = text_decoder(WARM, skip_special_tokens=True)(tokens.token_ids)
    assert compute_score("second_try", solution, prompt.ground_truth, prompt.extra_info) == score


def decode_turn(episode: Episode, text: str) -> None:
    """What an engine would have sampled."""
    token_ids = tuple(text_encoder(WARM)(f"{text}{STOP}"))
    episode.take(Delta(episode.request().id, token_ids, (-0.5,) * len(token_ids), "stop"))
