"""Turns a prompt into token ids, the way the model was taught to read prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""One chat message: `role`, `content`, and whatever else the file has."""
PromptText = list[Message] | str
Encode = Callable[[PromptText], Sequence[int]]


class _ChatTokenizer(Protocol):
    """What is used here of transformers' tokenizers, whose own types are unions of all that they can return."""

    chat_template: str | dict[str, str] | None

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool
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
    contents are joined. Plain text is encoded as it is. Raises ValueError for messages that the template refuses.
    """
    from jinja2 import TemplateError  # comes with the chat templates

    chat = cast(_ChatTokenizer, tokenizer)

    def encode(prompt: PromptText) -> list[int]:
        if isinstance(prompt, str):
            text = prompt
        elif chat.chat_template is None:
            text = "".join(message["content"] for message in prompt)
        else:
            try:
                text = chat.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from error
        # The template writes every special token itself, and a base model's prompt has none.
        return chat.encode(text, add_special_tokens=False)

    return encode
