"""Holds the prompts of one data set by id; which comes when is control's to say."""

from collections.abc import Iterator, Sequence

from laminar.control.messages import PromptId
from laminar.data.records import Prompt


class PromptPool:
    """Prompts with the ids 0, 1, …, in the order of the files. Training and held-out prompts have a pool each."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        for position, prompt in enumerate(prompts):
            if prompt.id != position:
                raise ValueError(f"prompt {position} of the pool has id {prompt.id}; ids must count from 0 in order")
        self._prompts = tuple(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __getitem__(self, id: PromptId) -> Prompt:
        if not 0 <= id < len(self._prompts):
            raise KeyError(f"prompt {id} is not in the pool, whose ids are 0 to {len(self._prompts) - 1}")
        return self._prompts[id]
