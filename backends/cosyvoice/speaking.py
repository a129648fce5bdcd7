"""One utterance: the language model in a thread of its own, the audio in the caller's.

All of an utterance's state lives in one call of `speak` and dies with it. However the call ends (last sample, error,
cancel, the caller leaving), the thread has ended before.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from backends.api import AudioChunk
from backends.cosyvoice.flow import VoicePrefix
from backends.cosyvoice.hift import SAMPLE_RATE
from backends.cosyvoice.sampling import SilenceFilter
from backends.cosyvoice.speech_lm import LanguageModel, LMPrompt
from backends.cosyvoice.stream import TokenStream
from backends.cosyvoice.tokens_to_audio import TokensToAudio
from backends.errors import BackendError, SynthesisFailed

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 0.2
JOIN_SECONDS = 30.0


def silence() -> AudioChunk:
    """What is heard of a text with nothing to say."""
    return AudioChunk(np.zeros(round(SILENCE_SECONDS * SAMPLE_RATE), np.float32))


def speak(
    lm: LanguageModel,
    to_audio: TokensToAudio,
    prompt: LMPrompt,
    voice: VoicePrefix,
    cancel: threading.Event,
    *,
    seed: int | None = None,
    streaming: bool = True,
    speed: float = 1.0,
) -> Iterator[AudioChunk]:
    """Audio of one utterance, in order; a model that says nothing gives a short silence.

    Not `streaming`: one chunk, computed when all tokens exist, and only then may `speed` differ from 1.
    Raises Cancelled, InvalidInput, SynthesisFailed, from either thread.
    """
    producer = _Producer(lm, prompt, seed, cancel)
    try:
        heard = False
        if streaming:
            for samples in to_audio.run(producer.stream, voice, cancel):
                heard = True
                yield AudioChunk(samples, producer.take_count())
        else:
            tokens, _ = producer.stream.wait(sys.maxsize)
            if tokens:
                heard = True
                yield AudioChunk(to_audio.whole(tokens, voice, cancel, speed=speed), producer.take_count())
        if not heard:
            yield silence()
    finally:
        producer.stop()


class _Producer:
    """Runs the language model until it has ended or nobody wants it."""

    def __init__(self, lm: LanguageModel, prompt: LMPrompt, seed: int | None, cancel: threading.Event) -> None:
        self.stream = TokenStream()
        self._lm, self._prompt, self._seed, self._cancel = lm, prompt, seed, cancel
        self._made = self._taken = 0
        self._thread = threading.Thread(target=self._run, name="speech tokens", daemon=True)
        self._thread.start()

    def take_count(self) -> int:
        """How many tokens were made since the last call, silent ones that are not heard included."""
        made = self._made
        new, self._taken = made - self._taken, made
        return new

    def stop(self) -> None:
        """End the thread. Raises SynthesisFailed when it does not end: its work then still holds the model."""
        self.stream.cancel()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            logger.error("the language model did not stop within %.0f s", JOIN_SECONDS)
            raise SynthesisFailed(f"the language model did not stop within {JOIN_SECONDS:.0f} s")

    def _run(self) -> None:
        audible = SilenceFilter()
        try:
            with closing(self._lm.generate(self._prompt, seed=self._seed, stopped=self._stopped)) as tokens:
                for token in tokens:
                    self._made += 1
                    if audible.keeps(token):
                        self.stream.put(token)
        except BackendError as error:
            self.stream.close(error)
        except BaseException as error:  # noqa: BLE001  it must not end in this thread, where nobody sees it
            failure = SynthesisFailed(f"the language model failed: {error!r}")
            failure.__cause__ = error
            self.stream.close(failure)
        else:
            self.stream.close()

    def _stopped(self) -> bool:
        return self._cancel.is_set() or self.stream.cancelled
