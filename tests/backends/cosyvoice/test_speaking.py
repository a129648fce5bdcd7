"""One utterance, two threads. Nothing here depends on how fast either is."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing

import numpy as np
import pytest
import torch

from backends.cosyvoice.checkpoint import load_flow, load_vocoder
from backends.cosyvoice.flow import VoicePrefix
from backends.cosyvoice.speaking import SILENCE_SECONDS, speak
from backends.cosyvoice.speech_lm import LanguageModel, LMPrompt
from backends.cosyvoice.tokens_to_audio import TokensToAudio
from backends.cosyvoice.vocoder import VocoderState
from backends.errors import Cancelled, InvalidInput, SynthesisFailed
from tests.backends.cosyvoice.doubles import Gate, Scripted, Wrapped
from tests.tiny_cosyvoice import DATA

PROMPT = LMPrompt((1, 2, 3), constant=1, spoken=2)
SAMPLES_PER_TOKEN = 960
FIRST_STEP = 25 + 10 + 3  # a hop, the padding after the 40 tokens of the golden prompt, and the look-ahead


@pytest.fixture(scope="module")
def to_audio() -> TokensToAudio:
    return TokensToAudio(load_flow(DATA / "tiny/flow.pt"), load_vocoder(DATA / "tiny/hift.pt"))


@pytest.fixture(scope="module")
def voice(to_audio: TokensToAudio) -> VoicePrefix:
    with np.load(DATA / "golden/inputs.npz") as inputs:
        mel = torch.from_numpy(inputs["prompt_feat"][0].T.copy())
        embedding = torch.from_numpy(inputs["embedding"][0])
        return to_audio.flow.prepare_voice(inputs["prompt_token"][0].tolist(), mel, embedding)


@pytest.fixture
def say(to_audio: TokensToAudio, voice: VoicePrefix) -> Callable[..., Generator]:
    def start(lm: LanguageModel, cancel: threading.Event | None = None, **options) -> Generator:
        return speak(lm, to_audio, PROMPT, voice, cancel or threading.Event(), **options)

    return start


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "speech tokens"]


def test_the_first_audio_is_there_before_the_last_token_is_made(say) -> None:
    gate = Gate()

    def before(token: int) -> None:
        if token == FIRST_STEP:
            gate.wait()  # no token beyond those of the first step exists until the test says so

    lm = Wrapped(Scripted(60), before)
    with closing(say(lm)) as chunks:
        first = next(chunks)
        gate.reached()
        assert len(first.samples) == (FIRST_STEP - 3) * SAMPLES_PER_TOKEN - 8 * 480
        assert lm.events == ["began 1"]
        gate.open()
        rest = list(chunks)
    assert lm.events == ["began 1", "ended 1"]
    assert sum(len(chunk.samples) for chunk in [first, *rest]) == 60 * SAMPLES_PER_TOKEN
    assert sum(chunk.tokens for chunk in [first, *rest]) == 60


def test_streaming_waits_for_no_token_more_than_a_step_needs(say) -> None:
    gate = Gate()

    def before(token: int) -> None:
        if token == FIRST_STEP + 25:
            gate.wait()

    lm = Wrapped(Scripted(200), before)
    with closing(say(lm)) as chunks:
        next(chunks)
        next(chunks)
        assert lm.events == ["began 1"]
        gate.open()


def test_without_streaming_there_is_one_chunk_of_everything(say) -> None:
    (chunk,) = say(Scripted(60), streaming=False)
    assert len(chunk.samples) == 60 * SAMPLES_PER_TOKEN
    assert chunk.tokens == 60


def test_without_streaming_speed_changes_the_length(say) -> None:
    (chunk,) = say(Scripted(60), streaming=False, speed=1.25)
    assert len(chunk.samples) == 60 * SAMPLES_PER_TOKEN / 1.25


@pytest.mark.parametrize("streaming", [True, False])
def test_no_tokens_are_a_short_silence(say, streaming: bool) -> None:
    (chunk,) = say(Scripted(0), streaming=streaming)
    assert len(chunk.samples) == SILENCE_SECONDS * 24000
    assert not chunk.samples.any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shortest_utterances_are_heard(say, count: int) -> None:
    assert sum(len(chunk.samples) for chunk in say(Scripted(count))) == count * SAMPLES_PER_TOKEN


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("at", [0, 10, FIRST_STEP + 5])
def test_a_failure_of_the_language_model_is_raised_and_not_a_short_success(say, streaming: bool, at: int) -> None:
    def before(token: int) -> None:
        if token == at:
            raise RuntimeError("no more")

    with pytest.raises(SynthesisFailed, match="the language model failed: RuntimeError"):
        list(say(Wrapped(Scripted(60), before), streaming=streaming))
    assert producers() == []


def test_an_error_that_says_what_is_wrong_arrives_as_it_is(say) -> None:
    def before(token: int) -> None:
        raise InvalidInput("too long", param="input")

    with pytest.raises(InvalidInput, match="too long"):
        list(say(Wrapped(Scripted(60), before)))


@pytest.mark.parametrize("streaming", [True, False])
def test_cancelled_while_tokens_are_made(say, streaming: bool) -> None:
    cancel = threading.Event()

    def before(token: int) -> None:
        if token == 5:
            cancel.set()
            raise Cancelled("as the real one does in its next step")

    lm = Wrapped(Scripted(60), before)
    with pytest.raises(Cancelled):
        list(say(lm, cancel, streaming=streaming))
    assert lm.events == ["began 1", "ended 1"]
    assert producers() == []


def test_cancelled_in_the_vocoder_the_thread_has_ended_too(say, to_audio: TokensToAudio, voice: VoicePrefix) -> None:
    cancel = threading.Event()

    class CancelledMeanwhile:
        """The tiny vocoder; its caller's client goes away during the first call."""

        calls = 0

        def start(self) -> VocoderState:
            return to_audio.vocoder.start()

        def step(self, mel, state, *, final=False):
            self.calls += 1
            cancel.set()
            return to_audio.vocoder.step(mel, state, final=final)

    vocoder = CancelledMeanwhile()
    lm = Wrapped(Scripted(200), lambda token: None)
    chunks = speak(lm, TokensToAudio(to_audio.flow, vocoder), PROMPT, voice, cancel)
    next(chunks)
    with pytest.raises(Cancelled):
        next(chunks)
    assert vocoder.calls == 1
    assert lm.events == ["began 1", "ended 1"]
    assert producers() == []


def test_a_listener_who_leaves_stops_a_language_model_that_would_never_end(say) -> None:
    lm = Wrapped(Scripted(10**12), lambda token: None)
    chunks = say(lm)
    next(chunks)
    chunks.close()
    assert lm.events == ["began 1", "ended 1"]
    assert producers() == []


def test_long_silences_are_shortened_but_counted(say) -> None:
    class Silent(Scripted):
        def generate(self, prompt, *, seed, stopped):
            yield from [100] * 5 + [1] * 20 + [200] * 5

    chunks = list(say(Silent(0)))
    assert sum(len(chunk.samples) for chunk in chunks) == 15 * SAMPLES_PER_TOKEN
    assert sum(chunk.tokens for chunk in chunks) == 30


def test_requests_share_nothing(say) -> None:
    alone = [np.concatenate([chunk.samples for chunk in say(Scripted(count))]) for count in (60, 90)]
    first, second = say(Scripted(60)), say(Scripted(90))
    mixed: tuple[list, list] = ([], [])
    with closing(first), closing(second):
        for _ in range(10):
            for chunks, parts in ((first, mixed[0]), (second, mixed[1])):
                parts.extend(chunk.samples for chunk in [next(chunks, None)] if chunk)
    for expected, parts in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), expected)
