"""Features of waveforms against the golden front end, case (g)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cosyvoice.features import kaldi_fbank, prompt_mel, resample, stretch_mel, whisper_log_mel
from tests.golden import golden, largest_difference


def case(name: str) -> torch.Tensor:
    return golden("g_frontend", name)


def test_prompt_mel_is_the_golden_one() -> None:
    found = torch.from_numpy(prompt_mel(case("wave_24k").numpy()).T)[None]
    assert largest_difference(found, case("prompt_feat_24k")) < 1e-4


def test_whisper_log_mel_is_the_golden_one() -> None:
    found = torch.from_numpy(whisper_log_mel(case("wave_16k").numpy()))[None]
    assert largest_difference(found, case("whisper_logmel_16k")) < 1e-4


def test_filter_bank_is_the_golden_one() -> None:
    found = torch.from_numpy(kaldi_fbank(case("wave_16k").numpy()))
    assert largest_difference(found, case("kaldi_fbank_16k_raw")) < 1e-3
    assert largest_difference(found - found.mean(dim=0), case("kaldi_fbank_16k_mean_subtracted")) < 1e-3


@pytest.mark.parametrize(("source", "target"), [(24000, 16000), (16000, 24000)])
def test_resampled_audio_is_the_golden_one(source: int, target: int) -> None:
    wave = case(f"wave_{source // 1000}k").numpy()
    found = torch.from_numpy(resample(wave, source, target))
    wanted = case(f"resample_{source // 1000}k_to_{target // 1000}k")[0]
    assert largest_difference(found[: len(wanted)], wanted) < 1e-5


@pytest.mark.parametrize("speed", [1.25, 0.8])
def test_stretched_mel_is_the_golden_one(speed: float) -> None:
    assert largest_difference(stretch_mel(case("speed_in")[0], speed)[None], case(f"speed_out_{speed}")) < 1e-6


@settings(deadline=None, max_examples=30)
@given(
    source=st.sampled_from([8000, 11025, 22050, 44100, 44101, 48000, 96000]),
    target=st.sampled_from([16000, 24000]),
    hertz=st.floats(50, 3000),
)
def test_a_sine_stays_a_sine_at_any_rate(source: int, target: int, hertz: float) -> None:
    wave = np.sin(2 * np.pi * hertz * np.arange(source // 5) / source)
    found = resample(wave, source, target)
    wanted = np.sin(2 * np.pi * hertz * np.arange(len(found)) / target)
    assert len(found) == -(-len(wave) * target // source)
    assert np.abs(found - wanted)[200:-200].max() < 0.02


def test_the_same_rate_changes_nothing() -> None:
    wave = case("wave_16k").numpy()
    assert np.array_equal(resample(wave, 16000, 16000), wave)


@pytest.mark.parametrize(("feature", "shortest"), [(prompt_mel, 721), (whisper_log_mel, 201), (kaldi_fbank, 400)])
def test_a_waveform_that_is_too_short_is_refused(feature, shortest) -> None:
    feature(np.zeros(shortest, np.float32))
    with pytest.raises(ValueError, match=str(shortest)):
        feature(np.zeros(shortest - 1, np.float32))


def test_a_stereo_waveform_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        prompt_mel(np.zeros((2, 24000), np.float32))
