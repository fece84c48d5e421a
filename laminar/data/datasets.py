"""Reads verl-schema data sets into prompts, tokenised once, and says clearly what is wrong with a file.

A row has `prompt` (chat messages or plain text), `data_source`, `reward_model.ground_truth`, and maybe `extra_info`;
other columns are ignored.
"""

import difflib
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from laminar.control.messages import PromptId
from laminar.data.chat import Encode, Opening, PromptText
from laminar.data.records import Problem, Prompt
from laminar.data.rows import Place, Row, found_columns, read_rows

log = logging.getLogger(__name__)


class DataSet(msgspec.Struct, frozen=True):
    """The prompts of some files, and what was left out of them."""

    prompts: tuple[Prompt, ...]
    num_rows: int
    num_duplicates: int
    """Rows whose prompt an earlier row has; in `prompts` unless they were removed."""
    num_conflicting: int
    """Those of the duplicates whose ground truth differs from the first one's."""
    num_too_long: int
    """Rows left out since their prompt has too many tokens."""


def load_prompts(
    files: Sequence[Path],
    *,
    encode: Encode,
    prompt_tokens_max: int,
    prompt_key: str = "prompt",
    dedup: bool = False,
    open_problem: Callable[[Problem], PromptText | Opening] | None = None,
) -> DataSet:
    """Read the files in order; prompt ids count from 0 over those kept. `open_problem`: the environment's.

    Duplicates are counted and warned of; `dedup` keeps the first of each. Raises ValueError naming file, row and
    column for a row that does not fit, and if nothing is left.
    """
    if not files:
        raise ValueError("no file to read prompts from; name one in data.train_files (held-out: data.val_files)")
    loading = _Loading(encode, prompt_tokens_max, prompt_key, dedup, open_problem)
    for file in files:
        _load_file(loading, file)
    loaded = loading.result()
    names = ", ".join(str(file) for file in files)
    if not loaded.prompts:
        raise ValueError(
            f"{names}: no prompt is left: all {loaded.num_rows} have more than data.prompt_tokens_max="
            f"{prompt_tokens_max} tokens; raise it"
        )
    _warn(loaded, names, prompt_tokens_max, dedup=dedup)
    return loaded


@dataclass(slots=True)
class _Seen:
    """The first row with some prompt: its duplicates need not be encoded again."""

    token_ids: tuple[int, ...]
    ground_truth: object


@dataclass(slots=True)
class _Loading:
    encode: Encode
    prompt_tokens_max: int
    prompt_key: str
    dedup: bool
    open_problem: Callable[[Problem], PromptText | Opening] | None
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    seen: dict[bytes, _Seen] = field(default_factory=dict[bytes, _Seen])
    num_rows: int = 0
    num_duplicates: int = 0
    num_conflicting: int = 0
    num_too_long: int = 0

    def result(self) -> DataSet:
        return DataSet(tuple(self.prompts), self.num_rows, self.num_duplicates, self.num_conflicting, self.num_too_long)


def _load_file(loading: _Loading, file: Path) -> None:
    num_rows_before = loading.num_rows
    columns = (loading.prompt_key, "data_source", "reward_model", "extra_info")
    for place, row in read_rows(file, columns):
        loading.num_rows += 1
        _load_row(loading, _RowReader(file, place, row, loading.prompt_key))
    if loading.num_rows == num_rows_before:
        raise ValueError(f"{file}: the file has no rows")


def _load_row(loading: _Loading, reader: "_RowReader") -> None:
    text = reader.prompt()
    ground_truth = reader.ground_truth()
    data_source, extra_info = reader.data_source(), reader.extra_info()
    opening: PromptText | Opening = text
    if loading.open_problem is not None:
        opening = reader.open(loading.open_problem, Problem(text, data_source, ground_truth, extra_info))
    as_read = [opening.messages, opening.tools] if isinstance(opening, Opening) else opening
    key = hashlib.blake2b(json.dumps(as_read, sort_keys=True, default=str).encode(), digest_size=16).digest()
    seen = loading.seen.get(key)
    if seen is None:
        seen = loading.seen[key] = _Seen(reader.encode(loading.encode, opening), ground_truth)
    else:
        loading.num_duplicates += 1
        loading.num_conflicting += seen.ground_truth != ground_truth
        if loading.dedup:
            return
    if len(seen.token_ids) > loading.prompt_tokens_max:
        loading.num_too_long += 1
        return
    id = PromptId(len(loading.prompts))
    loading.prompts.append(Prompt(id, seen.token_ids, data_source, ground_truth, extra_info))


class _RowReader:
    """Takes one row apart; every complaint names file, row and column."""

    def __init__(self, file: Path, place: Place, row: Row, prompt_key: str) -> None:
        self._file = file
        self._place = place
        self._row = row
        self._prompt_key = prompt_key

    def prompt(self) -> PromptText:
        value = self._column(self._prompt_key, "data.prompt_key")
        if isinstance(value, str) and value:
            return value
        if not isinstance(value, list) or not value:
            self._refuse(self._prompt_key, "a non-empty list of chat messages, or text", cast(object, value))
        return [self._message(message) for message in cast(list[object], value)]

    def data_source(self) -> str:
        value = self._column("data_source")
        return value if isinstance(value, str) else self._refuse("data_source", "text", value)

    def ground_truth(self) -> object:
        reward_model = self._column("reward_model")
        if not isinstance(reward_model, dict):
            self._refuse("reward_model", "an object with `ground_truth`", reward_model)
        value = cast(dict[str, object], reward_model).get("ground_truth")
        if value is None:
            self._refuse("reward_model", "an object with `ground_truth` that is not null", cast(object, reward_model))
        return value

    def extra_info(self) -> dict[str, Any]:
        """Kept as the file has it; a row without any gets an empty one."""
        value = self._row.get("extra_info")
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._refuse("extra_info", "an object", value)
        extra_info = cast(dict[str, Any], value)
        index = extra_info.get("index")
        if not isinstance(index, int | str | None):
            self._refuse("extra_info.index", "a whole number or text", index)
        return extra_info

    def open(self, open_problem: Callable[[Problem], PromptText | Opening], problem: Problem) -> PromptText | Opening:
        """The first messages by the environment, which may find fault with the row."""
        try:
            return open_problem(problem)
        except ValueError as error:
            raise ValueError(f"{self._file}, {self._place}: {error}") from error

    def encode(self, encode: Encode, opening: PromptText | Opening) -> tuple[int, ...]:
        try:
            if isinstance(opening, Opening):
                token_ids = tuple(encode(opening.messages, opening.tools))
            else:
                token_ids = tuple(encode(opening))
        except (ValueError, TypeError) as error:  # a lone surrogate is no text for a tokenizer
            raise ValueError(f"{self._where(self._prompt_key)}: {error}") from error
        if not token_ids:
            raise ValueError(f"{self._where(self._prompt_key)}: the prompt has no tokens")
        return token_ids

    def _message(self, value: object) -> dict[str, str]:
        expected = "chat messages with `role` and `content`, both text"
        if not isinstance(value, dict):
            self._refuse(self._prompt_key, expected, value)
        # Parquet gives every message the fields of all; those it does not have are null.
        message = {k: v for k, v in cast(dict[str, Any], value).items() if v is not None}
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            self._refuse(self._prompt_key, expected, message)
        return message

    def _column(self, name: str, setting: str | None = None) -> object:
        if name not in self._row:
            self._raise_missing(name, setting)
        return self._row[name]

    def _where(self, column: str) -> str:
        return f"{self._file}, {self._place}, column {column!r}"

    def _refuse(self, column: str, expected: str, found: object) -> NoReturn:
        shown = repr(found)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
        raise ValueError(f"{self._where(column)}: expected {expected}; found {type(found).__name__}: {shown}")

    def _raise_missing(self, name: str, setting: str | None) -> NoReturn:
        found = found_columns(self._file, self._row)
        message = f"{self._file}, {self._place}: no column {name!r}; found {', '.join(found) or 'none'}"
        if nearest := difflib.get_close_matches(name, found, n=1):
            message += f"; did you mean {nearest[0]!r}?"
        if setting is not None:
            message += f"; {setting} names the column"
        if not {self._prompt_key, "data_source", "reward_model"} & set(found):
            message += (
                ". This is another schema: convert it to rows of prompt=[{role, content}], data_source=text, "
                "reward_model={ground_truth}"
            )
            if {"question", "answer"} <= set(found):
                message += ", with `question` as the content and the end of `answer` as the ground truth"
        raise ValueError(message)


def _warn(loaded: DataSet, names: str, prompt_tokens_max: int, *, dedup: bool) -> None:
    if loaded.num_duplicates:
        num_unique = loaded.num_rows - loaded.num_duplicates
        what = "kept once each" if dedup else "kept all, so that an epoch repeats them; data.dedup=true keeps one each"
        log.warning(
            "%s: %d of %d rows repeat an earlier prompt (%d different ones; %d repeats with another ground truth): %s",
            names,
            loaded.num_duplicates,
            loaded.num_rows,
            num_unique,
            loaded.num_conflicting,
            what,
        )
    if loaded.num_too_long:
        log.warning(
            "%s: %d of %d rows left out, their prompts have more than data.prompt_tokens_max=%d tokens",
            names,
            loaded.num_too_long,
            loaded.num_rows,
            prompt_tokens_max,
        )
