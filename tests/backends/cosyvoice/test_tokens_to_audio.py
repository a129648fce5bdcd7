"""Tokens to audio as they come: golden case (f), the order of things, and every way to stop."""

import threading
from collections.abc import Sequence

import pytest
import torch

from backends.cosyvoice.checkpoint import load_flow, load_flow_network, load_vocoder
from backends.cosyvoice.flow import Flow, VoicePrefix
from backends.cosyvoice.stream import TokenStream
from backends.cosyvoice.tokens_to_audio import FinalChunk, TokensToAudio
from backends.cosyvoice.vocoder import Vocoder
from backends.errors import Cancelled, SynthesisFailed
from tests.golden import FLOW, HIFT, GoldenSourceNoise, golden, relative_rms, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 2e-2
LENGTHS = [29760, 24000, 24000, 24000, 29760]


@pytest.fixture(scope="module")
def flow() -> Flow:
    return load_flow(FLOW)


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    return load_vocoder(HIFT, noise=GoldenSourceNoise())


@pytest.fixture(scope="module")
def voice(flow: Flow) -> VoicePrefix:
    prompt, mel = golden("inputs", "prompt_token")[0], golden("inputs", "prompt_feat")[0].mT
    return flow.prepare_voice(prompt, mel, golden("inputs", "embedding")[0])


def closed(every: Sequence[int], error: BaseException | None = None) -> TokenStream:
    """A stream whose writer has finished."""
    stream = TokenStream()
    for token in every:
        stream.put(token)
    stream.close(error)
    return stream


def audio(name: str) -> torch.Tensor:
    return golden("f_token2wav", name).squeeze()


def test_with_a_full_final_chunk_the_audio_is_the_golden_one(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    both = TokensToAudio(flow, vocoder, final_chunk="full")
    chunks = [torch.from_numpy(chunk) for chunk in both.run(closed(tokens()), voice, threading.Event())]
    assert [len(chunk) for chunk in chunks] == LENGTHS
    assert relative_rms(torch.cat(chunks), audio("hop25_audio")) < LIMIT


def test_with_a_causal_final_chunk_all_audio_but_the_last_is_the_golden_one(
    flow: Flow, vocoder: Vocoder, voice: VoicePrefix
) -> None:
    both = TokensToAudio(flow, vocoder)
    chunks = [torch.from_numpy(chunk) for chunk in both.run(closed(tokens()), voice, threading.Event())]
    assert [len(chunk) for chunk in chunks] == LENGTHS
    wanted = audio("hop25_audio").split(LENGTHS)
    for chunk, golden_chunk in zip(chunks[:4], wanted[:4], strict=True):
        assert relative_rms(chunk, golden_chunk) < LIMIT
    # The last second is the golden vocoder's for the mel whose mask stays on to the end.
    mel = golden("d_flow_stream", "mel_final_streaming_true")[0]
    assert relative_rms(chunks[4], vocoder.whole(mel)[-LENGTHS[4] :]) < LIMIT


def test_a_whole_utterance_is_the_golden_one(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    found = TokensToAudio(flow, vocoder).whole(tokens(), voice, threading.Event())
    assert relative_rms(torch.from_numpy(found), audio("nonstream_audio")) < LIMIT


def test_speed_makes_a_whole_utterance_shorter(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    found = TokensToAudio(flow, vocoder).whole(tokens()[:50], voice, threading.Event(), speed=1.25)
    assert len(found) == 480 * 80


def test_an_early_first_hop_gives_the_same_audio_sooner(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    stream = TokenStream()
    for token in tokens()[:13]:
        stream.put(token)
    chunks = TokensToAudio(flow, vocoder, first_hop="early").run(stream, voice, threading.Event())
    first = next(chunks)
    assert len(first) == 480 * 12
    for token in tokens()[13:]:
        stream.put(token)
    stream.close()
    early = torch.cat([torch.from_numpy(chunk) for chunk in (first, *chunks)])
    normal = TokensToAudio(flow, vocoder).run(closed(tokens()), voice, threading.Event())
    assert relative_rms(early, torch.cat([torch.from_numpy(chunk) for chunk in normal])) < LIMIT


def test_each_chunk_is_there_before_the_next_token_is_needed(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    stream = TokenStream()
    chunks = TokensToAudio(flow, vocoder).run(stream, voice, threading.Event())
    done = 0
    for count in (38, 63, 88):
        for token in tokens()[done:count]:
            stream.put(token)
        done = count
        assert len(next(chunks)) > 0  # would block for ever if it needed another token


@pytest.mark.parametrize("final_chunk", ["causal", "full"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 37, 38])
def test_an_utterance_of_any_length_is_spoken_whole(
    flow: Flow, vocoder: Vocoder, voice: VoicePrefix, count: int, final_chunk: FinalChunk
) -> None:
    both = TokensToAudio(flow, vocoder, final_chunk=final_chunk)
    chunks = list(both.run(closed(tokens()[:count]), voice, threading.Event()))
    assert all(len(chunk) for chunk in chunks)
    assert sum(len(chunk) for chunk in chunks) == 960 * count
    assert len(both.whole(tokens()[:count], voice, threading.Event())) == 960 * count


def test_one_request_does_not_change_the_next(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    both = TokensToAudio(flow, vocoder)

    def speak(every: Sequence[int]) -> list[bytes]:
        return [chunk.tobytes() for chunk in both.run(closed(every), voice, threading.Event())]

    first = speak(tokens()[:70])
    abandoned = both.run(closed(tokens()), voice, threading.Event())
    next(abandoned)
    assert speak(tokens()[:70]) == first


def test_an_error_of_the_stream_passes_after_the_audio_before_it(
    flow: Flow, vocoder: Vocoder, voice: VoicePrefix
) -> None:
    stream = TokenStream()
    for token in tokens()[:38]:
        stream.put(token)
    chunks = TokensToAudio(flow, vocoder).run(stream, voice, threading.Event())
    next(chunks)
    stream.close(SynthesisFailed("decoding failed"))
    with pytest.raises(SynthesisFailed, match="decoding failed"):
        next(chunks)


def test_a_token_that_the_flow_does_not_know_is_a_failure(flow: Flow, vocoder: Vocoder, voice: VoicePrefix) -> None:
    chunks = TokensToAudio(flow, vocoder).run(closed([7000]), voice, threading.Event())
    with pytest.raises(SynthesisFailed, match="speech token 7000"):
        next(chunks)


class CancellingNoise:
    """Sets the flag at the n-th call: in the middle of a piece."""

    def __init__(self, cancel: threading.Event, call: int) -> None:
        self._golden, self._cancel, self._left = GoldenSourceNoise(), cancel, call

    def rows(self, start: int, stop: int) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._cancel.set()
        return self._golden.rows(start, stop)


def test_cancelling_stops_before_the_next_flow_call(flow: Flow, voice: VoicePrefix) -> None:
    cancel = threading.Event()
    vocoder = load_vocoder(HIFT, noise=CancellingNoise(cancel, call=2))
    chunks = TokensToAudio(flow, vocoder).run(closed(tokens()), voice, cancel)
    assert len(next(chunks)) == LENGTHS[0]
    assert len(next(chunks)) == LENGTHS[1]
    with pytest.raises(Cancelled):
        next(chunks)


def test_cancelling_stops_before_the_vocoder_call(vocoder: Vocoder, voice: VoicePrefix) -> None:
    cancel = threading.Event()
    made: list[int] = []

    class CancellingFlow(Flow):
        def step(self, tokens, state, *, final=False, check=None):
            mel, state = super().step(tokens, state, final=final, check=check)
            made.append(mel.shape[1])
            cancel.set()
            return mel, state

    flow = CancellingFlow(load_flow_network(FLOW))
    with pytest.raises(Cancelled):
        next(TokensToAudio(flow, vocoder).run(closed(tokens()), voice, cancel))
    assert made == [70]


@pytest.mark.parametrize("option", ["first_hop", "final_chunk"])
def test_an_unknown_choice_is_refused_at_once(flow: Flow, vocoder: Vocoder, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 'loud'"):
        TokensToAudio(flow, vocoder, **{option: "loud"})
