"""Where a GGUF of the language model keeps text and speech: two layouts, told apart by the file's metadata.

merged: one vocabulary; text ids first, speech id s at an offset. Any runtime can run it, but every step computes
        the scores of 150,000 text ids that are never chosen.
speech: the vocabulary and the output head are the 6761 speech rows alone. The embeddings of a prompt lie in a
        .npy file beside the GGUF (float16, memory-mapped): the text table, then the speech table again, so that
        a whole prompt goes in as one batch of embeddings.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.cosyvoice.ids import FILL, SPEECH_CODES, SPEECH_ROWS, TEXT_ROWS
from backends.cosyvoice.llama import LlamaFile
from backends.errors import BackendUnavailable

KEY_LAYOUT: Final = "cosyvoice3.layout"
KEY_OFFSET: Final = "cosyvoice3.speech_offset"
KEY_EMBEDDINGS: Final = "cosyvoice3.embeddings_file"
KEY_FINGERPRINT: Final = "cosyvoice3.embeddings_fingerprint"
ARCHITECTURE: Final = "qwen2"

_HINT = "`llama-lease convert` makes one from llm.pt"


@dataclass(frozen=True, slots=True)
class Layout:
    """How prompts and speech tokens are put to a GGUF file.

    In prompts, text ids are below `text_rows` and speech id s is `text_rows + s`. In the file's vocabulary speech
    id s is `first_row + s`, and `speech_rows` of them exist. `embeddings`, shape (text_rows + speech_rows, width),
    float16: what prompts are looked up in where the vocabulary has no text.
    """

    text_rows: int
    first_row: int
    speech_rows: int
    embeddings: NDArray[np.float16] | None = None


def read_layout(path: Path) -> Layout:
    """Look at a GGUF file. Raises BackendUnavailable saying what is wrong with it and what would be right."""
    file = LlamaFile(path)
    try:
        architecture = file.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise BackendUnavailable(
                f"{path}: a model of architecture {architecture!r}, not CosyVoice3's language model ({ARCHITECTURE}); {_HINT}"
            )
        layout = file.get(KEY_LAYOUT) or "merged"
        match layout:
            case "merged":
                return _merged(file)
            case "speech":
                return _speech(file)
            case _:
                raise BackendUnavailable(f"{path}: unknown layout {layout!r}; this version knows merged and speech")
    finally:
        file.close()


def fingerprint(embeddings: NDArray[np.float16]) -> str:
    """Tells one embeddings file from another without reading all of it: a hash of its first and last rows."""
    ends = np.concatenate([embeddings[:64], embeddings[-64:]])
    return hashlib.sha256(ends.tobytes()).hexdigest()


def _merged(file: LlamaFile) -> Layout:
    """The offset is 1. what the metadata says, 2. where the vocabulary has a run of numbered names, 3. the usual one."""
    told = file.get(KEY_OFFSET)
    if told is not None and not told.isdecimal():
        raise BackendUnavailable(f"{file.path}: {KEY_OFFSET} is {told!r}, not a number")
    offset = int(told) if told is not None else _offset_by_names(file)  # (1) (2)
    if offset is None:
        offset = TEXT_ROWS  # (3)
    rows = min(file.rows - offset, SPEECH_ROWS)
    if rows <= FILL:
        raise BackendUnavailable(
            f"{file.path}: a vocabulary of {file.rows} entries has no room for speech tokens from {offset} on:"
            f" not CosyVoice3's language model; {_HINT}"
        )
    return Layout(text_rows=offset, first_row=offset, speech_rows=rows)


def _offset_by_names(file: LlamaFile) -> int | None:
    """The id whose name ends in 0 while the one 6560 later has the same name with 6560, as in <|s_0|>."""
    for token in range(file.rows - SPEECH_CODES + 1) if file.has_texts else ():
        name = re.fullmatch(r"(\D+)0(\D*)", file.text(token))
        if name and file.text(token + SPEECH_CODES - 1) == f"{name[1]}{SPEECH_CODES - 1}{name[2]}":
            return token
    return None


def _speech(file: LlamaFile) -> Layout:
    if file.rows != SPEECH_ROWS:
        raise BackendUnavailable(f"{file.path}: {file.rows} speech rows, expected {SPEECH_ROWS}; {_HINT}")
    path = file.path.parent / (file.get(KEY_EMBEDDINGS) or "")
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BackendUnavailable(
            f"{path}: the embeddings of {file.path.name} cannot be read ({error}); {_HINT}"
        ) from error
    width = int(file.get(f"{ARCHITECTURE}.embedding_length") or 0)
    if table.dtype != np.float16 or table.ndim != 2 or table.shape[1] != width or len(table) <= SPEECH_ROWS:
        raise BackendUnavailable(
            f"{path}: {table.dtype} of shape {table.shape}, expected float16 of ({SPEECH_ROWS} + text rows, {width})"
        )
    if fingerprint(table) != file.get(KEY_FINGERPRINT):
        raise BackendUnavailable(f"{path}: does not belong to {file.path.name}; convert both again")
    return Layout(text_rows=len(table) - SPEECH_ROWS, first_row=0, speech_rows=SPEECH_ROWS, embeddings=table)
