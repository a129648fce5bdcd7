"""The language model: text ids in, speech tokens out, one by one.

A prompt is `[sos] + text + [task] + speech of the voice`. It is read in two parts: the constant part of a voice
and mode (its `constant` first text ids), whose state is kept, and the rest. The parts are always read apart,
whether the state was kept or not, so the arithmetic is the same and a seed gives the same tokens.

One context, one generation at a time: a lock is held from the first position to the last token.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.cosyvoice.ids import SOS, SPEECH_CODES, TASK
from backends.cosyvoice.layout import Layout, read_layout
from backends.cosyvoice.llama import Llama
from backends.cosyvoice.sampling import length_limits, sample, without_stops
from backends.errors import Cancelled, InvalidInput, SynthesisFailed

_LOOK_UP = 0.25  # seconds between two looks at the flag of a caller who waits for another's generation to end


@dataclass(frozen=True, slots=True)
class LMPrompt:
    """What the model reads before it speaks: text ids and speech tokens of the voice.

    The first `constant` text ids are the same for every text of this voice and mode; the last `spoken` ones
    count for the length limits.
    """

    text: tuple[int, ...]
    constant: int
    spoken: int
    speech: tuple[int, ...] = ()


class LanguageModel(Protocol):
    """What the rest of the backend knows of a language model. All calls block; `close` ends its life."""

    @property
    def text_rows(self) -> int:
        """How many text ids it knows."""
        ...

    @property
    def context(self) -> int:
        """The most positions, prompt and answer together."""
        ...

    def generate(
        self, prompt: LMPrompt, *, seed: int | None, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        """Speech tokens as they are made, the ending token not among them. `stopped` is asked in every step.
        Close the generator when you leave it early: it holds the model.

        Raises Cancelled, InvalidInput (param "input": the context is too small), SynthesisFailed.
        """
        ...

    def warm(self, prompt: LMPrompt) -> None:
        """Read the constant part of a prompt now, so that the first request need not."""
        ...

    def close(self) -> None:
        """Give the memory back; waits for a generation in progress."""
        ...


class SpeechLM:
    """The language model on llama.cpp."""

    def __init__(self, llama: Llama, layout: Layout, *, kept_bytes: int) -> None:
        """Takes over `llama`. `kept_bytes` bounds the states kept for constant parts of prompts."""
        self._llama = llama
        self._layout = layout
        self._lock = threading.Lock()
        self._kept = _Kept(kept_bytes)
        self._held: tuple[int, ...] = ()  # the constant part that the context begins with

    @property
    def text_rows(self) -> int:
        return self._layout.text_rows

    @property
    def context(self) -> int:
        return self._llama.context

    def generate(
        self, prompt: LMPrompt, *, seed: int | None, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        """See LanguageModel. The same seed and prompt give the same tokens, whatever ran before."""
        fewest, most = length_limits(prompt.spoken)
        room = self.context - len(prompt.text) - len(prompt.speech) - 2
        if room < fewest:
            raise InvalidInput(
                f"the text and the voice's prompt leave {room} of {self.context} positions, at least {fewest} are needed",
                param="input",
            )
        random = np.random.default_rng(seed)
        first = self._layout.first_row
        history: list[int] = []
        limit = min(most, room)
        if not limit:
            return
        with self._alone(stopped):
            logits = self._read(prompt, stopped)
            while True:
                if stopped():
                    raise Cancelled("cancelled while speech tokens were made")
                scores: NDArray[np.floating] = logits[first : first + self._layout.speech_rows]
                if len(history) < fewest:
                    scores = without_stops(scores)
                try:
                    token = sample(scores, history, random)
                except ValueError as error:
                    raise SynthesisFailed(f"the language model gives no usable scores: {error}") from error
                if token >= SPEECH_CODES:
                    return
                history.append(token)
                yield token
                if len(history) == limit:
                    return
                logits = self._llama.decode_token(first + token)

    def warm(self, prompt: LMPrompt) -> None:
        with self._alone(lambda: False):
            self._read_constant(self._split(prompt)[0], lambda: False)

    def close(self) -> None:
        with self._lock:
            self._llama.close()

    @contextmanager
    def _alone(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Hold the model. Under a lease nobody ever waits here; where someone does, he can be cancelled too."""
        while not self._lock.acquire(timeout=_LOOK_UP):  # an event and a lock cannot be waited for together
            if stopped():
                raise Cancelled("cancelled while another generation ran")
        try:
            yield
        finally:
            self._lock.release()

    def _split(self, prompt: LMPrompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The constant part and the rest, as ids of the prompt (see Layout)."""
        speech = self._layout.text_rows
        constant = (speech + SOS, *prompt.text[: prompt.constant])
        rest = (*prompt.text[prompt.constant :], speech + TASK, *(speech + token for token in prompt.speech))
        return constant, rest

    def _read(self, prompt: LMPrompt, stopped: Callable[[], bool]) -> NDArray[np.float32]:
        constant, rest = self._split(prompt)
        self._read_constant(constant, stopped)
        return self._append(rest, stopped)

    def _read_constant(self, ids: tuple[int, ...], stopped: Callable[[], bool]) -> None:
        """1. It may be in the context already, 2. or have been kept; 3. else it is read, and kept."""
        if ids == self._held:  # (1)
            self._llama.rewind(len(ids))
            return
        self._held = ()
        state = self._kept.get(ids)
        if state is not None:  # (2)
            self._llama.restore(state, len(ids))
        else:  # (3)
            self._llama.rewind(0)
            self._append(ids, stopped)
            self._kept.put(ids, self._llama.save())
        self._held = ids

    def _append(self, ids: tuple[int, ...], stopped: Callable[[], bool]) -> NDArray[np.float32]:
        if self._layout.embeddings is None:
            return self._llama.decode_tokens(ids, stopped)
        rows = self._layout.embeddings[list(ids)].astype(np.float32)  # (positions, width)
        return self._llama.decode_embeddings(rows, stopped)


def open_speech_lm(path: Path, *, context: int, threads: int, gpu_layers: int, kept_bytes: int) -> SpeechLM:
    """Load a GGUF of either layout. Raises BackendUnavailable naming the file and what would be right."""
    layout = read_layout(path)
    # The prompt of one sentence fits into one computation; a longer one can be cancelled between two.
    llama = Llama(path, context=context, batch=min(512, context), threads=threads, gpu_layers=gpu_layers)
    return SpeechLM(llama, layout, kept_bytes=kept_bytes)


class _Kept:
    """States by the ids that they hold, the least recently used forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[tuple[int, ...], bytes] = OrderedDict()

    def get(self, ids: tuple[int, ...]) -> bytes | None:
        if ids in self._states:
            self._states.move_to_end(ids)
        return self._states.get(ids)

    def put(self, ids: tuple[int, ...], state: bytes) -> None:
        self._states[ids] = state
        while self._states and sum(map(len, self._states.values())) > self._limit:
            self._states.popitem(last=False)
