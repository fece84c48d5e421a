"""Reads the tool calls in a model's turn, and writes what the tools answered, in one of two formats.

template   <tool_call>{"name": …, "arguments": {…}}</tool_call>, answers by the tokenizer's chat template (Qwen, Hermes)
tags       <code>…</code>, answered by <output>…</output>: no JSON, one tool, one call a turn
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from laminar.data.chat import Chat
from laminar.envs.env import Observation

CALL, CALL_END = "<tool_call>", "</tool_call>"
THOUGHT_END = "</think>"
CODE, CODE_END = "<code>", "</code>"
OUTPUT, OUTPUT_END = "<output>", "</output>"


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class BadCall(msgspec.Struct, frozen=True):
    """What the model meant as a call and is none: `cause` is for the model to read."""

    cause: str


Call = ToolCall | BadCall


class ToolFormat(Protocol):
    @property
    def turn_ends(self) -> tuple[str, ...]: ...

    def calls(self, text: str) -> list[Call]:
        """The calls in a turn, in their order; none: the model has given its answer."""
        ...

    def answer(self, names: Sequence[str], outputs: Sequence[str]) -> Observation:
        """What the model reads next: the output of each of these calls' tools, in the order of the calls."""
        ...


class TemplateFormat:
    """The model's own format.

    With `parallel` a message ends where the model ends it, and may hold several calls; what it writes after the last
    one it writes without having seen the result, so then none is executed and the model is told. Without it the first
    `</tool_call>` ends the turn, so that nothing of the kind can be written.
    """

    def __init__(self, chat: Chat, *, parallel: bool) -> None:
        """Raises ValueError for a tokenizer whose chat template has no place for tools."""
        self._chat = chat
        self._parallel = parallel
        self.turn_ends = () if parallel else (CALL_END,)
        chat.around_outputs(["any"], after_end_of_turn=parallel)

    def calls(self, text: str) -> list[Call]:
        said = text.removesuffix(self._chat.end_of_turn).rpartition(THOUGHT_END)[2]
        before, *parts = said.split(CALL)
        if not parts:
            return [BadCall(f"{CALL_END} without {CALL}")] if CALL_END in before else []
        calls: list[Call] = []
        for part in parts:
            inside, end, after = part.partition(CALL_END)
            if not end:
                calls.append(BadCall(f"{CALL} without {CALL_END}"))
            elif after.strip():
                cause = "a message ends with its calls: what comes after one was written before its result was known"
                return [BadCall(f"{cause}; none was executed")] * len(parts)
            else:
                calls.append(parse_call(inside))
        return calls

    def answer(self, names: Sequence[str], outputs: Sequence[str]) -> Observation:
        around = self._chat.around_outputs(names, after_end_of_turn=self._parallel)
        pieces = [around[0]]
        for output, piece in zip(outputs, around[1:], strict=True):
            pieces += (self._chat.neutral(output), piece)
        return Observation(tuple(pieces))


class TagFormat:
    """For models without such a template: `</code>` ends the turn, so nothing is written before the output is in."""

    turn_ends = (CODE_END,)

    def __init__(self, chat: Chat, tool: str) -> None:
        self._chat = chat
        self._tool = tool

    def calls(self, text: str) -> list[Call]:
        before, end, _ = text.rpartition(CODE_END)
        if not end:
            return []
        _, begin, code = before.rpartition(CODE)
        return [ToolCall(self._tool, {"code": code}) if begin else BadCall(f"{CODE_END} without {CODE}")]

    def answer(self, names: Sequence[str], outputs: Sequence[str]) -> Observation:
        (output,) = outputs
        return Observation((OUTPUT, self._chat.neutral(output), OUTPUT_END))


def parse_call(text: str) -> Call:
    """One call as JSON: an object with a `name`, and `arguments` that are an object, or one written as text."""
    try:
        value = cast(object, json.loads(text))
        if isinstance(value, dict):
            arguments = cast(dict[str, object], value).get("arguments", {})
            value["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        return BadCall(f"the call is not JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        return BadCall("the call is not JSON that can be read: it is nested too deeply")
    match value:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, cast(dict[str, Any], arguments))
        case _:
            return BadCall('a call is {"name": the tool, "arguments": an object}')
