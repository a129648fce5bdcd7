"""Text to what the language model reads, in the model's three modes.

zero_shot      a voice whose transcript is known: system line, end of prompt, transcript | text | the voice's tokens
cross_lingual  a voice without transcript:        system line, end of prompt, text                | no tokens
instruct2      a style in words:                  system line, style, end of prompt | text        | no tokens

Text is made speakable (numbers, dates: the wetext package, where it is installed) and cut into pieces of at most 80
tokens. A text with a `<|...|>` marker is left as it is: whoever writes markers means every character.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from backends.cosyvoice.ids import END_OF_PROMPT
from backends.cosyvoice.speech_lm import LMPrompt
from backends.cosyvoice.tokenizer import Tokenizer
from backends.text import sentences, speakable

logger = logging.getLogger(__name__)

SYSTEM = "You are a helpful assistant."
PIECE_TOKENS = 80

Normalizer = Callable[[str], str]
"""Makes one sentence speakable."""

_MARKER = re.compile(r"<\|.*?\|>")
_CHINESE, _KANA = re.compile(r"[\u4e00-\u9fff]"), re.compile(r"[\u3040-\u30ff]")
# Letters or digits on both sides of a break would grow together without a space.
_NO_SPACE = ("W", "F")


class Prompts:
    """Writes prompts and cuts texts. Pure: the same text gives the same result, on any thread."""

    def __init__(self, tokenizer: Tokenizer, normalizer: Normalizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._normalizer = normalizer

    def count(self, text: str) -> int:
        """Text tokens of a text as it was written."""
        return len(self._tokenizer.encode(text))

    def split(self, text: str) -> list[str]:
        """Pieces of at most 80 tokens, as long as they can be; [] for a text with nothing to say."""
        if _MARKER.search(text):
            return [text]
        if not speakable(text):
            return []
        spoken = sentences(text)
        if self._normalizer:
            spoken = [self._normalizer(sentence) for sentence in spoken]
        pieces: list[str] = []
        for part in self._fit(spoken):
            joined = _join(pieces[-1], part) if pieces else part
            if pieces and self.count(joined) <= PIECE_TOKENS:
                pieces[-1] = joined
            else:
                pieces.append(part)
        return pieces

    def zero_shot(self, text: str, transcript: str, speech: Sequence[int]) -> LMPrompt:
        """For a voice whose prompt of `speech` tokens says `transcript`."""
        return self._prompt(f"{SYSTEM}{END_OF_PROMPT}{transcript}", text, speech)

    def cross_lingual(self, text: str) -> LMPrompt:
        """For a voice of which nobody knows what it says. The system line counts as spoken here."""
        constant, own = self._tokenizer.encode(SYSTEM + END_OF_PROMPT), self._tokenizer.encode(text)
        return LMPrompt(constant + own, constant=len(constant), spoken=len(constant) + len(own) if own else 0)

    def instruct2(self, text: str, instructions: str) -> LMPrompt:
        """For a style such as "Please speak as loudly as possible."."""
        return self._prompt(f"{SYSTEM} {instructions.strip()}{END_OF_PROMPT}", text, ())

    def _prompt(self, before: str, text: str, speech: Sequence[int]) -> LMPrompt:
        # Encoded apart, as the model was trained: no token spans the two.
        constant, own = self._tokenizer.encode(before), self._tokenizer.encode(text)
        return LMPrompt(constant + own, constant=len(constant), spoken=len(own), speech=tuple(speech))

    def _fit(self, parts: Sequence[str]) -> Iterator[str]:
        """Cut what has too many tokens in halves, at a clause or a space if there is one, until it has not."""
        for part in parts:
            if self.count(part) <= PIECE_TOKENS or len(part) == 1:
                yield part
            else:
                yield from self._fit(sentences(part, (len(part) + 1) // 2))


def wetext_normalizer() -> Normalizer | None:
    """Numbers, dates and signs to words by the wetext package; None where it is not installed.

    Chinese text by the Chinese rules, plain ASCII by the English ones, everything else is left alone: English words
    for the numbers of a French sentence would be worse than its digits.
    """
    try:
        from wetext import Normalizer as Rules
    except ImportError:
        return None
    chinese, english = Rules(lang="zh", operator="tn"), Rules(lang="en", operator="tn")

    def normalize(text: str) -> str:
        if _CHINESE.search(text) and not _KANA.search(text):
            rules = chinese
        elif text.isascii():
            rules = english
        else:
            return text
        try:
            return str(rules.normalize(text)).strip() or text
        except Exception as error:  # noqa: BLE001  whatever its grammars stumble over: digits are better than no speech
            logger.warning("text normalisation failed, a sentence is left as it is: %r", error)
            return text

    return normalize


def _join(left: str, right: str) -> str:
    wide = any(unicodedata.east_asian_width(character) in _NO_SPACE for character in (left[-1], right[0]))
    return left + right if wide else f"{left} {right}"
