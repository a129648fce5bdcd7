"""How the next speech token is chosen: nucleus sampling that avoids repetition.

1. Draw from the nucleus: the most probable tokens, best first (equal ones by lower id), until their sum reaches
   `top_p` or there are `top_k` of them; the one that reaches `top_p` is in.
2. If the drawn token occurs often enough among the last `window` generated ones, forbid it and draw once from
   all the others, by their full probabilities.
(The repetition-aware sampling of VALL-E 2, with CosyVoice3's numbers.)

Pure: logits, history and a random generator in, a token out; the caller's arrays are never written to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.cosyvoice.ids import (
    MAX_SILENT_RUN,
    MAX_TOKENS_PER_TEXT_TOKEN,
    MIN_TOKENS_PER_TEXT_TOKEN,
    SILENT_CODES,
    SPEECH_CODES,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler's numbers: nucleus mass and size, the window looked back on, and the share of it that is too often."""

    top_p: float = 0.8
    top_k: int = 25
    window: int = 10
    tau: float = 0.1


def softmax(logits: NDArray[np.floating]) -> Floats:
    """Probabilities, shape as given. Raises ValueError when no logit is finite or one is not a number."""
    scores = logits.astype(np.float64)
    top = scores.max()
    if not np.isfinite(top):
        raise ValueError(f"logits are not finite (maximum {top})")
    weights: Floats = np.exp(scores - top)
    weights /= weights.sum()
    return weights


def nucleus(probabilities: Floats, sampling: Sampling) -> tuple[NDArray[np.intp], Floats]:
    """The ids that step 1 draws from, best first, and their probabilities, summing to 1."""
    count = min(sampling.top_k, probabilities.size)
    least = np.partition(probabilities, -count)[-count]
    # Ascending ids, so that the stable sort leaves equal probabilities in the order of their ids.
    candidates = np.flatnonzero(probabilities >= least)
    ids = candidates[np.argsort(-probabilities[candidates], kind="stable")][:count]
    before = np.cumsum(probabilities[ids]) - probabilities[ids]
    ids = ids[before < sampling.top_p]
    weights = probabilities[ids]
    return ids, weights / weights.sum()


def repeated(token: int, history: Sequence[int], sampling: Sampling) -> bool:
    """Whether `token` occurs too often at the end of `history`."""
    recent = history[-sampling.window :] if sampling.window else ()
    return sum(past == token for past in recent) >= sampling.window * sampling.tau


def others(logits: NDArray[np.floating], token: int) -> Floats:
    """The probabilities of step 2: all tokens but `token`."""
    allowed = logits.astype(np.float64)
    allowed[token] = -np.inf
    return softmax(allowed)


def sample(
    logits: NDArray[np.floating], history: Sequence[int], random: np.random.Generator, sampling: Sampling | None = None
) -> int:
    """The next token for `logits` of shape (rows,) after `history`, the tokens generated so far (not the prompt)."""
    sampling = sampling or Sampling()
    ids, weights = nucleus(softmax(logits), sampling)
    token = int(ids[_draw(weights, random)])
    if repeated(token, history, sampling):
        token = _draw(others(logits, token), random)
    return token


def without_stops(logits: NDArray[np.floating]) -> NDArray[np.floating]:
    """A copy in which no token that ends the generation can be chosen."""
    allowed = logits.copy()
    allowed[SPEECH_CODES:] = -np.inf
    return allowed


def length_limits(text_tokens: int) -> tuple[int, int]:
    """The fewest and the most speech tokens for a text of so many tokens (the prompt's text not counted)."""
    return MIN_TOKENS_PER_TEXT_TOKEN * text_tokens, MAX_TOKENS_PER_TEXT_TOKEN * text_tokens


class SilenceFilter:
    """Shortens silences: of a run of silent codes, in any mixture, only the first five are kept."""

    def __init__(self, silent: Iterable[int] = SILENT_CODES, longest: int = MAX_SILENT_RUN) -> None:
        self._silent = frozenset(silent)
        self._longest = longest
        self._run = 0

    def keeps(self, token: int) -> bool:
        """Whether this next token is to be heard. Ask exactly once per token, in order."""
        self._run = self._run + 1 if token in self._silent else 0
        return self._run <= self._longest


def _draw(weights: Floats, random: np.random.Generator) -> int:
    """An index, with probability in proportion to its weight."""
    sums = np.cumsum(weights)
    # The product can round up to the whole sum; the last index with any weight is meant then.
    index = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))
