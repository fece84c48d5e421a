"""Lets the model run Python while it works on a problem: `rollout.environment=math_with_code`.

The code runs in the sandbox. The trajectory ends with the first turn that calls no tool.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from laminar.data.chat import Opening, PromptText, ToolSchema
from laminar.data.records import Problem
from laminar.envs.env import Environment, Observation, Services, Turn
from laminar.envs.sandbox.sandbox import Sandbox
from laminar.envs.tool_calls import BadCall, Call, TagFormat, TemplateFormat, ToolCall, ToolFormat

TOOL = "code_interpreter"
_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs Python and shows what it prints, and the value of its last line. Nothing is kept between "
        "two calls, and nothing outside can be reached.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
    },
}


class ToolKwargs(msgspec.Struct, frozen=True):
    """What a row says of one of its tools (verl's `extra_info.tools_kwargs[name]`)."""

    wall_s: float | None = None
    """Its `execute_kwargs.timeout`."""


class MathWithCode(Environment):
    """Problems with a final answer, and a Python tool; at most `rollout.num_tool_calls_max` calls a trajectory.

    A row whose `extra_info.need_tools_kwargs` is set has only the tools that its `tools_kwargs` names, if any.
    """

    uses_sandbox = True

    def start(self, services: Services) -> None:
        """Raises ValueError if the tokenizer cannot write calls in the format asked for."""
        self._sandbox: Sandbox = services.sandbox
        self._num_calls_max = services.rollout.num_tool_calls_max
        self._format = _format(services)
        self.turn_ends = self._format.turn_ends

    def first_messages(self, problem: Problem) -> PromptText | Opening:
        tools = tools_of(problem.extra_info)
        if isinstance(self._format, TagFormat) or TOOL not in tools:
            return problem.prompt
        return Opening(problem.prompt, (_SCHEMA,))

    async def observe(self, turn: Turn) -> Observation | None:
        calls = self._format.calls(turn.text)
        if not calls:
            return None
        num_before = sum(len(self._format.calls(text)) for text in turn.earlier_turns)
        tools = tools_of(turn.extra_info)
        outputs = await asyncio.gather(
            *(self._answer(call, number, tools) for number, call in enumerate(calls, num_before + 1))
        )
        return self._format.answer([_name(call) for call in calls], outputs)

    async def _answer(self, call: Call, number: int, tools: dict[str, ToolKwargs]) -> str:
        """The tool's output, or what is wrong with the call; raises SandboxUnavailable, no fault of the model's."""
        if number > self._num_calls_max:
            return f"error: only {self._num_calls_max} calls are allowed, and they are used up; give your answer"
        if isinstance(call, BadCall):
            return f"error: {call.cause}"
        if call.name not in tools:
            return f"error: there is no tool {call.name!r}; there is {', '.join(tools) or 'none'}"
        code = call.arguments.get("code")
        if not isinstance(code, str) or set(call.arguments) != {"code"}:
            return f'error: {TOOL} takes one argument, "code", a text; found {_shown(call)}'
        outcome = await self._sandbox.run(code, wall_s=tools[call.name].wall_s)
        return outcome.text()


def tools_of(extra_info: dict[str, Any]) -> dict[str, ToolKwargs]:
    """The tools of a row by name. Raises ValueError for one that names tools, or settings of theirs, that are none.

    Parquet gives every row the fields of all, so what is null is not there.
    """
    named = cast(dict[str, Any], extra_info.get("tools_kwargs") or {})
    if not extra_info.get("need_tools_kwargs") or not named:
        return {TOOL: ToolKwargs()}
    tools: dict[str, ToolKwargs] = {}
    for name, kwargs in named.items():
        if kwargs is None:
            continue
        if name != TOOL:
            raise ValueError(f"extra_info.tools_kwargs names {name!r}; math_with_code has {TOOL!r}")
        execute = {key: value for key, value in (kwargs.get("execute_kwargs") or {}).items() if value is not None}
        timeout = execute.pop("timeout", None)
        if execute or not isinstance(timeout, int | float | None):
            raise ValueError(
                f"extra_info.tools_kwargs.{name}.execute_kwargs may have `timeout` in seconds; found "
                f"{kwargs['execute_kwargs']}"
            )
        tools[name] = ToolKwargs(None if timeout is None else float(timeout))
    return tools


def _format(services: Services) -> ToolFormat:
    wanted = services.rollout.tool_format
    if wanted == "tags" or (wanted == "auto" and not services.chat.has_template):
        return TagFormat(services.chat, TOOL)
    try:
        return TemplateFormat(services.chat, parallel=services.rollout.parallel_tool_calls)
    except ValueError as error:
        raise ValueError(f"rollout.tool_format={wanted}: {error}; `tags` needs no template") from error


def _name(call: Call) -> str:
    return call.name if isinstance(call, ToolCall) else TOOL


def _shown(call: ToolCall) -> str:
    found: Sequence[str] = [f"{name!r} ({type(value).__name__})" for name, value in call.arguments.items()]
    return ", ".join(found) or "none"
