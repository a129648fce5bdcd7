"""When the next piece of speech is due, and how long it is.

The flow sees prompt and speech in chunks of 25 tokens, counted from the start of the prompt. A piece therefore
ends where a chunk ends: the first hop is the padding that fills the prompt's last chunk plus one chunk, each later
hop is one chunk. A piece can be made when its tokens and the three behind them exist, because the flow looks three
tokens ahead. When the stream has ended, the rest is one last piece.

A schedule belongs to one request and counts nothing but tokens.
"""

from dataclasses import dataclass
from typing import Literal, get_args

FirstHop = Literal["normal", "early"]

CHUNK_TOKENS = 25
LOOK_AHEAD = 3
EARLY_MINIMUM = 10
"""The vocoder holds back eight mel frames (four tokens), so that a hop below this makes too little audio to bridge
the time until the next one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece: the flow gets the first `num_tokens` tokens of the speech, and the piece begins after `token_offset`."""

    num_tokens: int
    token_offset: int
    final: bool


class Schedule:
    """The pieces of one request.

    `prompt_tokens` is the number of speech tokens of the voice's prompt. `first_hop` "normal" makes the first piece
    the padding plus one chunk; "early" makes it the padding alone where that is at least `EARLY_MINIMUM` tokens:
    the same mel, but the first audio is there after fewer tokens.
    """

    def __init__(self, prompt_tokens: int, first_hop: FirstHop = "normal") -> None:
        if first_hop not in get_args(FirstHop):
            raise ValueError(f"first_hop is {first_hop!r}; it can be {' or '.join(get_args(FirstHop))}")
        padding = -prompt_tokens % CHUNK_TOKENS
        early = first_hop == "early" and padding >= EARLY_MINIMUM
        self._hop = padding if early else padding + CHUNK_TOKENS
        self._offset = 0
        self._finished = False

    @property
    def finished(self) -> bool:
        """True after the final step was handed out, or the stream ended with no token at all."""
        return self._finished

    @property
    def needed(self) -> int:
        """How many tokens must exist for the next step, unless the stream ends before."""
        return self._offset + self._hop + LOOK_AHEAD

    def next_ready(self, available: int, done: bool) -> Step | None:
        """The next step that can run with `available` tokens, or None.

        `done` says that no more tokens will come: then the steps end with a final one, after which there is none. A
        stream without a single token has no step.
        """
        if self._finished:
            return None
        if available >= self.needed:
            step = Step(self.needed, self._offset, final=False)
            self._offset += self._hop
            self._hop = CHUNK_TOKENS
            return step
        if not done:
            return None
        self._finished = True
        return Step(available, self._offset, final=True) if available else None
