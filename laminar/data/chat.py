"""Turns a prompt into token ids, the way the model was taught to read prompts, and knows how it reads tool outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""One chat message: `role`, `content`, and whatever else the file has."""
PromptText = list[Message] | str
ToolSchema = dict[str, Any]
"""A tool as chat templates take it: OpenAI's `{"type": "function", "function": {name, description, parameters}}`."""

_OUTPUT = "\ue000{}\ue001"
"""Stands for a tool's output while the template is asked what goes around it; private use, so in no template."""


class Opening(msgspec.Struct, frozen=True):
    """How a trajectory begins: its first messages, and the tools that the chat template tells the model of."""

    messages: PromptText
    tools: tuple[ToolSchema, ...] = ()


class Encode(Protocol):
    def __call__(self, prompt: PromptText, tools: Sequence[ToolSchema] = ()) -> Sequence[int]: ...


class _ChatTokenizer(Protocol):
    """What is used here of transformers' tokenizers, whose own types are unions of all that they can return."""

    chat_template: str | dict[str, str] | None
    eos_token: str | None

    def apply_chat_template(
        self,
        conversation: list[Message],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[ToolSchema] | None = None,
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    if not folder.is_dir():
        raise ValueError(f"model.path={folder} is not a folder; name one with a Hugging Face model and its tokenizer")
    from transformers import AutoTokenizer  # heavy, and data is imported where no tokenizer is needed

    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(folder))  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={folder} holds no tokenizer that transformers can read: {error}") from error


def chat_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """The encoder of prompts for this tokenizer.

    Chat messages go through its chat template, ending where the assistant's turn begins; without a template their
    contents are joined. Plain text is encoded as it is. Raises ValueError for messages that the template refuses, and
    for tools without one.
    """
    chat = cast(_ChatTokenizer, tokenizer)

    def encode(prompt: PromptText, tools: Sequence[ToolSchema] = ()) -> list[int]:
        if tools and (isinstance(prompt, str) or chat.chat_template is None):
            raise ValueError("tools are told to the model by its tokenizer's chat template, and this prompt has none")
        if isinstance(prompt, str):
            text = prompt
        elif chat.chat_template is None:
            text = "".join(message["content"] for message in prompt)
        else:
            text = _apply(chat, prompt, tools, add_generation_prompt=True)
        # The template writes every special token itself, and a base model's prompt has none.
        return chat.encode(text, add_special_tokens=False)

    return encode


class Chat:
    """How one model's conversations go on after its turn: what its template writes around the outputs of tools."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = cast(_ChatTokenizer, tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        self._special_texts = tuple(token.content for token in added if token.special)
        self.has_template = self._tokenizer.chat_template is not None

    @property
    def end_of_turn(self) -> str:
        """What ends a message of the model's; empty if the tokenizer does not say."""
        return self._tokenizer.eos_token or ""

    def neutral(self, text: str) -> str:
        """The text, in which nothing is a special token any more: a tool must not be able to end its own message."""
        for special in self._special_texts:
            text = text.replace(special, f"{special[0]}\u200b{special[1:]}")
        return text

    def around_outputs(self, names: Sequence[str], *, after_end_of_turn: bool) -> tuple[str, ...]:
        """What the template writes before, between and after the outputs of these tools: one piece more than there are.

        It begins right after the end of the model's turn, or with it, and ends where its next turn begins. Raises
        ValueError for a template without tool messages, or that does not leave outputs as they are.
        """
        asked: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        outputs = [_OUTPUT.format(f" {n} <a") for n in range(len(names))]
        answers = [{"role": "tool", "name": name, "content": text} for name, text in zip(names, outputs, strict=True)]
        before = _apply(self._tokenizer, asked, (), add_generation_prompt=False)
        whole = _apply(self._tokenizer, [*asked, *answers], (), add_generation_prompt=True)
        turn_end = before.rfind(self.end_of_turn) if self.end_of_turn else -1
        if turn_end < 0 or not whole.startswith(before):
            raise ValueError("the tokenizer's chat template does not end messages with its eos_token, or rewrites them")
        rest = whole[turn_end + (len(self.end_of_turn) if after_end_of_turn else 0) :]
        pieces: list[str] = []
        for text in outputs:
            piece, found, rest = rest.partition(text)
            if not found:
                raise ValueError("the tokenizer's chat template does not write the outputs of tools as they are")
            pieces.append(piece)
        return (*pieces, rest)


def _apply(
    chat: _ChatTokenizer, messages: list[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool
) -> str:
    from jinja2 import TemplateError  # comes with the chat templates

    try:
        return chat.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=list(tools) or None
        )
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from error
