from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from backends.cosyvoice.features import kaldi_fbank, prompt_mel
from backends.cosyvoice.voice_encoder import VoiceEncoder
from backends.errors import BackendUnavailable, InvalidInput
from tests.tiny_cosyvoice import write_onnx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("onnx")
    write_onnx(path)
    return path


@pytest.fixture
def encoder(folder: Path) -> VoiceEncoder:
    return VoiceEncoder(folder, threads=1)


def noise(seconds: float, rate: int) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=round(seconds * rate)) / 10).astype(np.float32)


@pytest.mark.parametrize("rate", [16000, 24000, 44100])
def test_a_second_has_25_tokens_and_two_mel_frames_for_each(encoder: VoiceEncoder, rate: int) -> None:
    features = encoder.encode(noise(2.0, rate), rate)
    assert features.tokens.shape == (50,)
    assert features.mel.shape == (80, 100)
    assert features.embedding.shape == (192,)


@pytest.mark.parametrize("seconds", [1.0, 1.01, 1.03, 2.37])
def test_tokens_and_frames_are_cut_to_fit(encoder: VoiceEncoder, seconds: float) -> None:
    features = encoder.encode(noise(seconds, 24000), 24000)
    assert features.mel.shape == (80, 2 * len(features.tokens))
    assert len(features.tokens) == int(seconds * 25)


def test_the_mel_is_that_of_the_recording(encoder: VoiceEncoder) -> None:
    audio = noise(1.0, 24000)
    np.testing.assert_array_equal(encoder.encode(audio, 24000).mel, prompt_mel(audio)[:, :50])


def test_the_speaker_model_gets_the_filter_bank_without_its_mean(encoder: VoiceEncoder, folder: Path) -> None:
    audio = noise(1.0, 16000)
    fbank = kaldi_fbank(audio)
    session = onnxruntime.InferenceSession(str(folder / "campplus.onnx"))
    expected = session.run(None, {"input": (fbank - fbank.mean(axis=0))[None]})[0][0]
    np.testing.assert_allclose(encoder.encode(audio, 16000).embedding, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("audio", "rate", "reason"),
    [
        (noise(31.0, 16000), 16000, "lasts 31.0 s, it must last 1 to 30 s"),
        (noise(0.5, 24000), 24000, "lasts 0.5 s"),
        (noise(2.0, 8000), 8000, "8000 samples a second, at least 16000"),
        (np.zeros(48000, np.float32), 24000, "silent"),
        (np.full(48000, np.nan, np.float32), 24000, "numbers"),
        (np.zeros((2, 48000), np.float32), 24000, "one channel"),
    ],
)
def test_a_recording_that_cannot_be_used_is_the_caller_s_fault(
    encoder: VoiceEncoder, audio: np.ndarray, rate: int, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        encoder.encode(audio, rate)
    assert caught.value.param == "file"


def test_half_a_minute_is_still_taken(encoder: VoiceEncoder) -> None:
    assert len(encoder.encode(noise(30.0, 16000), 16000).tokens) == 750


@pytest.mark.parametrize("name", ["campplus.onnx", "speech_tokenizer_v3.onnx"])
def test_a_missing_truncated_or_wrong_model_is_named(tmp_path: Path, name: str) -> None:
    write_onnx(tmp_path)
    encoder, path = VoiceEncoder(tmp_path, threads=1), tmp_path / name
    other = ({"campplus.onnx", "speech_tokenizer_v3.onnx"} - {name}).pop()
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], (tmp_path / other).read_bytes()):
        path.write_bytes(content)
        with pytest.raises(BackendUnavailable, match=name):
            encoder.encode(noise(1.0, 16000), 16000)
    path.unlink()
    with pytest.raises(BackendUnavailable, match=name):
        encoder.encode(noise(1.0, 16000), 16000)


def test_the_fingerprint_changes_with_the_models(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    encoder = VoiceEncoder(tmp_path, threads=1)
    before = encoder.fingerprint
    with (tmp_path / "campplus.onnx").open("ab") as file:
        file.write(b"more")
    assert encoder.fingerprint != before
