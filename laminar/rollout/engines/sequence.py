"""Holds one request while the embedded engine decodes it."""

from dataclasses import dataclass, field

from laminar.rollout.engines.engine import Request
from laminar.rollout.engines.sampling import Noise


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens so far, and where its KV lies.

    num_cached: leading tokens whose KV the slot holds; the rest is still to be fed, so decoding means that exactly
    one is missing. kv: the KV of its leading tokens that it brought along, until it has a slot. pool, row: the slot
    (kv_slots.py), -1 while waiting. num_blocks: logical KV blocks held.
    """

    request: Request
    kv: memoryview | None = None
    tokens: list[int] = field(init=False)
    prompt: tuple[int, ...] = field(init=False)
    noise: Noise = field(init=False)
    num_new: int = 0
    num_cached: int = 0
    num_blocks: int = 0
    pool: int = -1
    row: int = -1

    def __post_init__(self) -> None:
        request = self.request
        self.noise = Noise(request.seed)
        self.tokens = list(request.token_ids)
        self.prompt = request.token_ids[: len(request.token_ids) - request.position]

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def num_shared(self) -> int:
        """Leading tokens whose KV another sequence of the same prompt could give; the last token is always fed."""
        return min(len(self.prompt), len(self.tokens) - 1)
