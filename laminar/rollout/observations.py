"""Makes tokens of what an environment answered, and cuts its outputs where there is too little room for them."""

from collections.abc import Callable, Sequence

from laminar.envs.env import Observation

CUT_MARK = " …[cut]… "
"""Stands for what was left out, so that the model can tell."""
CHARACTERS_PER_TOKEN_MAX = 16
"""More of an output than this for every token of room is not even looked at: a tool may print megabytes."""
FILLED_SHARE = 0.95
"""A cut that fills so much of the room is good enough."""

Encode = Callable[[str], Sequence[int]]


def encode_observation(observation: Observation, encode: Encode, *, num_tokens_max: int) -> Sequence[int] | None:
    """At most `num_tokens_max` tokens, made of the whole text at once, as the template's own would be.

    Of each output its beginning and its end stay, and as many characters as of the others. None if the markup alone
    does not fit. Raises ValueError for text that no tokenizer can read.
    """
    longest = max((len(output) for output in observation.pieces[1::2]), default=0)
    limit = min(longest, CHARACTERS_PER_TOKEN_MAX * num_tokens_max)
    token_ids = encode(shortened(observation, limit))
    if len(token_ids) <= num_tokens_max:
        return token_ids
    fits, too_many = 0, limit
    best = encode(shortened(observation, 0))
    if len(best) > num_tokens_max:
        return None
    while too_many - fits > 1 and len(best) < FILLED_SHARE * num_tokens_max:
        num_characters = (fits + too_many) // 2
        token_ids = encode(shortened(observation, num_characters))
        if len(token_ids) <= num_tokens_max:
            fits, best = num_characters, token_ids
        else:
            too_many = num_characters
    return best


def shortened(observation: Observation, num_characters_max: int) -> str:
    """The text, with so many characters of each output at most."""
    pieces = list(observation.pieces)
    for position in range(1, len(pieces), 2):
        output = pieces[position]
        if len(output) > num_characters_max:
            num_tail = num_characters_max // 2
            head, tail = output[: num_characters_max - num_tail], output[len(output) - num_tail :]
            pieces[position] = f"{head}{CUT_MARK}{tail}"
    return "".join(pieces)
