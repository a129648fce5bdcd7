"""Text to the ids of the language model: Qwen2's tokenizer with CosyVoice3's extra tokens.

The published folder CosyVoice-BlankEN holds Qwen2's own files. CosyVoice3 has 278 tokens more (`<|endofprompt|>`,
`[laughter]`, phonemes ...; official/special_tokens.json): what the files do not name gets the next free ids, in order.
Special tokens are found here and not by the library, so that an id is what the files say, whatever the vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from backends.cosyvoice.ids import END_OF_PROMPT, END_OF_PROMPT_ID
from backends.errors import BackendUnavailable

FOLDER = "CosyVoice-BlankEN"

# How Qwen2 cuts text into words before it looks for its tokens.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    """What the tokenizer files say: ordinary tokens, merges ("left right", best first) and special tokens."""

    tokens: Mapping[str, int]
    merges: tuple[str, ...]
    special: Mapping[str, int]

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(*self.tokens.values(), *self.special.values()) + 1


class Tokenizer:
    """Encodes text. Not changed after it is made; any thread may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            from tokenizers import Regex, models, normalizers, pre_tokenizers
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise BackendUnavailable(f"the package tokenizers is needed: {error}") from error
        self.size = vocabulary.size
        self._special = vocabulary.special
        # The longest first: of two that begin alike, the longer is meant.
        names = sorted(vocabulary.special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
        self._words: Any = Library(models.BPE(vocab=dict(vocabulary.tokens), merges=merges))
        self._words.normalizer = normalizers.NFC()
        self._words.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text; special tokens in it are recognised."""
        return tuple(self._ids(text))

    def _ids(self, text: str) -> Iterator[int]:
        for part in self._cut.split(text):
            if part in self._special:
                yield self._special[part]
            elif part:
                yield from self._words.encode(part, add_special_tokens=False).ids


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read tokenizer.json, or vocab.json and merges.txt with tokenizer_config.json.

    Raises BackendUnavailable when a file is missing or broken, or when it is another model's: the extra tokens
    must come out with `<|endofprompt|>` as 151646, which the model was trained with.
    """
    try:
        if (folder / "tokenizer.json").exists():
            tokens, merges, special = _one_file(folder / "tokenizer.json")
        else:
            tokens, merges, special = _three_files(folder)
    except OSError as error:
        raise BackendUnavailable(
            f"{folder}: {error.filename or error} cannot be read; needed: tokenizer.json,"
            " or vocab.json, merges.txt and tokenizer_config.json"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendUnavailable(f"{folder}: not the files of a Qwen2 tokenizer ({error!r})") from error
    following = max(*tokens.values(), *special.values()) + 1
    for name in _extra_tokens():
        if name not in special:
            special[name] = tokens.get(name, following)
            following += name not in tokens
    if special[END_OF_PROMPT] != END_OF_PROMPT_ID:
        raise BackendUnavailable(
            f"{folder}: {END_OF_PROMPT} has the id {special[END_OF_PROMPT]} here, CosyVoice3 needs {END_OF_PROMPT_ID};"
            " these are the files of another tokenizer"
        )
    return Vocabulary(tokens, merges, special)


def _one_file(path: Path) -> tuple[dict[str, int], tuple[str, ...], dict[str, int]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    special = {entry["content"]: int(entry["id"]) for entry in content.get("added_tokens", [])}
    return dict(model["vocab"]), merges, special


def _three_files(folder: Path) -> tuple[dict[str, int], tuple[str, ...], dict[str, int]]:
    tokens = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = tuple(line for line in lines if line and not line.startswith("#version"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {entry["content"]: int(id) for id, entry in config.get("added_tokens_decoder", {}).items()}
    return tokens, merges, special


def _extra_tokens() -> list[str]:
    data = files("backends.cosyvoice").joinpath("official/special_tokens.json").read_text(encoding="utf-8")
    names: list[str] = json.loads(data)["tokens"]
    return names
