import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.audio import OUT_RATE, Encoder, content_type, formats, to_pcm, wav_header
from backends.errors import SynthesisFailed
from backends.tempo import share_speed, tempo_factors
from tests.backends.readers import all_readers, read_with_av

Audio = NDArray[np.float32]


def tone(seconds: float, hertz: float = 440.0, rate: int = OUT_RATE) -> Audio:
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def voice(seconds: float) -> Audio:
    """Something like speech: harmonics of a gliding pitch, in syllables."""
    time = np.arange(round(seconds * OUT_RATE)) / OUT_RATE
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * time)) / OUT_RATE
    harmonics = sum(np.sin(n * phase) / n for n in range(1, 12))
    return (0.2 * harmonics * np.abs(np.sin(2 * np.pi * 2 * time))).astype(np.float32)


def encode(format: str, audio: Audio, cuts: list[int] | None = None, rate: int = OUT_RATE, tempo: float = 1.0) -> bytes:
    encoder = Encoder(format, rate, tempo=tempo)
    parts = [encoder.encode(piece) for piece in np.split(audio, cuts or [])]
    return b"".join([*parts, encoder.finish()])


def pitch(audio: Audio, rate: int) -> float:
    middle = audio[audio.size // 4 : 3 * audio.size // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(middle.size)))
    return float(np.argmax(spectrum)) * rate / middle.size


def likeness(made: Audio, read: Audio) -> float:
    """Correlation at the best of the first 5000 offsets, as some formats put a pad in front."""
    size = min(made.size, read.size) - 5000
    scores = np.correlate(read[: size + 5000], made[:size], mode="valid")
    best = int(np.argmax(scores))
    part = read[best : best + size]
    return float(scores[best] / (np.linalg.norm(part) * np.linalg.norm(made[:size]) + 1e-9))


@pytest.mark.parametrize("format", formats())
def test_every_reader_reads_back_what_was_written(format: str) -> None:
    made = voice(3.3)
    readers = all_readers(format, encode(format, made, [1000, 30_001, 60_000]))
    assert readers
    for reader, (read, rate) in readers.items():
        assert rate == 24000 if format != "opus" else rate in (24000, 48000)
        assert read.size / rate == pytest.approx(3.3, abs=0.1), reader
        assert np.abs(read).max() < 1.0
        assert likeness(made, read[:: rate // 24000].astype(np.float32)) > 0.98, reader


@pytest.mark.parametrize("format", formats())
@pytest.mark.parametrize("tempo", [1.0, 1.7, 0.4])
def test_the_cuts_between_chunks_cannot_be_heard(format: str, tempo: float) -> None:
    made = voice(2.0)
    whole, cut = (encode(format, made, cuts, tempo=tempo) for cuts in ([], [1, 777, 778, 20_000, 47_999]))
    if format == "opus":  # every file has its own serial number
        assert np.array_equal(read_with_av(whole)[0], read_with_av(cut)[0])
    else:
        assert whole == cut


@pytest.mark.parametrize("tempo", [0.25, 0.5, 0.8, 1.3, 2.0, 3.0, 4.0])
def test_tempo_changes_the_duration_and_not_the_pitch(tempo: float) -> None:
    made = tone(4.0)
    pcm = np.frombuffer(encode("pcm", made, list(range(5000, made.size, 5000)), tempo=tempo), "<i2")
    assert pcm.size / OUT_RATE == pytest.approx(4.0 / tempo, abs=0.1)
    assert pitch(pcm.astype(np.float32), OUT_RATE) == pytest.approx(440, rel=0.01)


def test_a_tone_that_is_slowed_down_has_no_clicks() -> None:
    made = tone(3.0)
    pcm = np.frombuffer(encode("pcm", made, list(range(700, made.size, 700)), tempo=0.7), "<i2") / 32767
    # The steepest step of a 440 Hz tone of this loudness; a click would be several times that.
    assert np.abs(np.diff(pcm)).max() < 1.3 * 0.5 * 2 * np.pi * 440 / OUT_RATE


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int) -> None:
    made = tone(2.0, rate=rate)
    pcm = np.frombuffer(encode("pcm", made, list(range(999, made.size, 999)), rate=rate), "<i2").astype(np.float32)
    assert pcm.size == pytest.approx(2 * OUT_RATE, abs=50)
    assert pitch(pcm, OUT_RATE) == pytest.approx(440, rel=0.01)
    assert np.abs(np.diff(pcm[100:-100] / 32767)).max() < 1.1 * 0.5 * 2 * np.pi * 440 / OUT_RATE


@pytest.mark.parametrize("format", formats())
@pytest.mark.parametrize("tempo", [1.0, 4.0])
def test_the_first_chunk_gives_bytes_at_once(format: str, tempo: float) -> None:
    assert len(Encoder(format, OUT_RATE, tempo=tempo).encode(voice(1.5))) > 500


@pytest.mark.parametrize("format", formats())
def test_an_encoder_without_audio_ends_cleanly(format: str) -> None:
    assert encode(format, np.zeros(0, np.float32)) is not None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(min_value=-100, max_value=100, width=32), min_size=1))
def test_loud_samples_are_clipped_and_never_wrap_around(samples: list[float]) -> None:
    loud = np.array(samples, np.float32)
    pcm = np.frombuffer(to_pcm(loud), "<i2").astype(np.int64)
    assert np.abs(pcm - np.clip(loud, -1, 1) * 32767).max() <= 1
    assert np.abs(pcm).max() <= 32767


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_audio_that_is_not_a_number_is_an_error(bad: float) -> None:
    with pytest.raises(SynthesisFailed):
        to_pcm(np.array([0.0, bad], np.float32))


@pytest.mark.parametrize("format", ["pcm", "wav"])
def test_chunks_have_whole_samples(format: str) -> None:
    encoder = Encoder(format, 22050, tempo=1.234)
    sizes = [len(encoder.encode(voice(seconds))) for seconds in (0.1, 0.033, 0.2, 0.0001)]
    assert all(size % 2 == 0 for size in [*sizes, len(encoder.finish())])
    assert sum(sizes) > 0


def test_a_wav_header_of_known_length_is_exact() -> None:
    data = wav_header(4) + b"\1\0\2\0"
    assert len(data) - 8 == int.from_bytes(data[4:8], "little")
    assert read_with_av(data)[0].size == 2
    assert wav_header(None)[4:8] == wav_header(None)[40:44] == b"\xff\xff\xff\xff"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="mp3, opus"):
        Encoder("ogg", OUT_RATE)


def test_content_types() -> None:
    types = ["audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm"]
    assert [content_type(format) for format in formats()] == types


@given(st.floats(min_value=0.25, max_value=4.0))
def test_speed_is_shared_between_the_backend_and_the_filter(speed: float) -> None:
    for own in [(0.5, 2.0), (1.0, 1.0), (0.8, 1.2)]:
        native, tempo = share_speed(speed, own)
        assert own[0] <= native <= own[1]
        assert native * tempo == pytest.approx(speed)
        if own[0] <= speed <= own[1]:
            assert tempo == pytest.approx(1.0)
        factors = tempo_factors(tempo)
        assert all(0.5 - 1e-6 <= factor <= 2.0 + 1e-6 for factor in factors)
        assert np.prod(factors) == pytest.approx(tempo)


def test_memory_does_not_grow_with_the_length() -> None:
    program = """if True:
        import resource, sys
        import numpy as np
        from backends.audio import Encoder
        audio = np.random.default_rng(0).uniform(-0.5, 0.5, 24000).astype(np.float32)
        for format in ("wav", "flac"):
            encoder = Encoder(format, 24000, tempo=1.25)
            for _ in range(int(sys.argv[1])):
                encoder.encode(audio)
            encoder.finish()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    peaks = [
        int(subprocess.run([sys.executable, "-c", program, seconds], capture_output=True, check=True).stdout)
        for seconds in ("10", "210")
    ]
    assert peaks[1] - peaks[0] < 4_000  # KiB; the samples alone would be 7,500
