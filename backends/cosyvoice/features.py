"""Waveforms to the features that the networks take, and a change of pace of a mel.

All spectra are computed in float64 and returned in float32. A waveform is mono, (samples,), in [-1, 1]: the speaker
model's filter bank takes it like that too, and not in the int16 range that its recipe has elsewhere.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Wave = NDArray[np.float32] | Floats
Features = NDArray[np.float32]

MEL_RATE = 24000
SPEECH_RATE = 16000

RESAMPLE_WIDTH = 6
RESAMPLE_ROLLOFF = 0.99
RESAMPLE_BLOCK = 65536

SLANEY_BREAK_HZ = 1000.0
SLANEY_BREAK_MEL = 15.0
SLANEY_HZ_PER_MEL = 200.0 / 3
SLANEY_LOG_STEP = math.log(6.4) / 27


def prompt_mel(wave: Wave) -> Features:
    """Log mel of a 24 kHz prompt, 80 bands, 480 samples a frame: (n,) -> (80, n // 480).

    Needs more than 720 samples: raises ValueError below.
    """
    size, hop, floor = 1920, 480, 1e-5
    _need(wave, (size - hop) // 2 + 1)
    padded = np.pad(np.asarray(wave, np.float64), (size - hop) // 2, mode="reflect")
    spectrum = np.fft.rfft(_windows(padded, size, hop) * _hann(size), axis=1)  # (T, 961)
    magnitude = np.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9)
    bands = magnitude @ slaney_bank(MEL_RATE, size, 80, 12000).T  # (T, 961) -> (T, 80)
    out: Features = np.log(np.maximum(bands, floor)).T.astype(np.float32)
    return out


def whisper_log_mel(wave: Wave) -> Features:
    """Whisper's log mel of 16 kHz audio, 128 bands, 160 samples a frame: (n,) -> (128, n // 160).

    Needs more than 200 samples: raises ValueError below.
    """
    size, hop, floor, decades = 400, 160, 1e-10, 8.0
    _need(wave, size // 2 + 1)
    padded = np.pad(np.asarray(wave, np.float64), size // 2, mode="reflect")
    spectrum = np.fft.rfft(_windows(padded, size, hop)[:-1] * _hann(size), axis=1)  # (T, 201)
    power = spectrum.real**2 + spectrum.imag**2
    bands = np.log10(np.maximum(power @ slaney_bank(SPEECH_RATE, size, 128, 8000).T, floor))  # (T, 128)
    bands = np.maximum(bands, bands.max() - decades)
    out: Features = ((bands + 4) / 4).T.astype(np.float32)
    return out


def kaldi_fbank(wave: Wave) -> Features:
    """Kaldi's log filter bank of 16 kHz audio, 80 bands, 25 ms every 10 ms, without dither: (n,) -> (T, 80).

    Needs 400 samples: raises ValueError below. The speaker model takes it minus its mean over time.
    """
    size, hop, fft, emphasis = 400, 160, 512, 0.97
    _need(wave, size)
    frames = _windows(np.asarray(wave, np.float64), size, hop)  # (T, 400)
    frames = frames - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    povey = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85
    spectrum = np.fft.rfft((frames - emphasis * before) * povey, n=fft, axis=1)  # (T, 257)
    power = spectrum.real**2 + spectrum.imag**2
    bands: Floats = power @ kaldi_bank(SPEECH_RATE, fft, 80, 20.0, 8000.0).T  # (T, 80)
    return np.log(np.maximum(bands, np.finfo(np.float32).eps)).astype(np.float32)


def resample(wave: Wave, source: int, target: int) -> Features:
    """Change the sample rate by a Hann-windowed sinc: (n,) -> (ceil(n * target / source),).

    Output i is the input's band-limited value at time i / target, each weight sinc(t) * cos^2(pi t / 12) for
    |t| < 6, t in periods of the lower of the two rates times 0.99 (Smith, "Digital Audio Resampling").
    """
    if source == target:
        return np.asarray(wave, np.float32)
    divisor = math.gcd(source, target)
    source, target = source // divisor, target // divisor
    rate = min(source, target) * RESAMPLE_ROLLOFF
    reach = math.ceil(RESAMPLE_WIDTH * source / rate)
    padded = np.pad(np.asarray(wave, np.float64), reach + 1)
    count = -(-len(wave) * target // source)
    out = np.empty(count, np.float32)
    taps = np.arange(-reach, reach + 1)
    for begin in range(0, count, RESAMPLE_BLOCK):
        index = np.arange(begin, min(begin + RESAMPLE_BLOCK, count))
        nearest = index * source // target  # the input sample at or before the output's time
        positions = nearest[:, None] + taps  # (block, 2 * reach + 1)
        time = (positions / source - (index / target)[:, None]) * rate
        weights = np.where(
            np.abs(time) < RESAMPLE_WIDTH, np.sinc(time) * np.cos(np.pi * time / (2 * RESAMPLE_WIDTH)) ** 2, 0.0
        )
        out[index] = (weights * padded[positions + reach + 1]).sum(axis=1) * (rate / source)
    return out


def stretch_mel(mel: Tensor, speed: float) -> Tensor:
    """Another pace: (80, T) -> (80, int(T / speed)), linear between frame centres."""
    frames = int(mel.shape[1] / speed)
    out: Tensor = torch.nn.functional.interpolate(mel[None], size=frames, mode="linear")[0]
    return out


def slaney_bank(rate: int, fft: int, bands: int, top_hz: float) -> Floats:
    """Triangles of equal area on Slaney's mel scale (linear to 1 kHz, then logarithmic) from 0 Hz: (bands, bins)."""
    edges = _slaney_to_hz(np.linspace(0, _hz_to_slaney(top_hz), bands + 2))
    bins = np.arange(fft // 2 + 1) * rate / fft
    return _triangles(bins, edges) * (2 / (edges[2:] - edges[:-2]))[:, None]


def kaldi_bank(rate: int, fft: int, bands: int, low_hz: float, top_hz: float) -> Floats:
    """Triangles of height 1, straight on the mel scale 1127 ln(1 + f / 700): (bands, bins)."""
    edges = np.linspace(_hz_to_mel(low_hz), _hz_to_mel(top_hz), bands + 2)
    bins = _hz_to_mel(np.arange(fft // 2 + 1) * rate / fft)
    return _triangles(bins, edges)


def _triangles(bins: Floats, edges: Floats) -> Floats:
    """Weights that rise from edge b to edge b + 1 and fall to edge b + 2: (bands, bins)."""
    left, centre, right = (edges[i : len(edges) - 2 + i, None] for i in range(3))
    return np.maximum(0, np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre)))


def _hz_to_mel(hertz: float | Floats) -> Floats:
    return 1127 * np.log1p(np.asarray(hertz, np.float64) / 700)


def _hz_to_slaney(hertz: float) -> float:
    if hertz < SLANEY_BREAK_HZ:
        return hertz / SLANEY_HZ_PER_MEL
    return SLANEY_BREAK_MEL + math.log(hertz / SLANEY_BREAK_HZ) / SLANEY_LOG_STEP


def _slaney_to_hz(mels: Floats) -> Floats:
    above = SLANEY_BREAK_HZ * np.exp(SLANEY_LOG_STEP * (mels - SLANEY_BREAK_MEL))
    return np.where(mels < SLANEY_BREAK_MEL, mels * SLANEY_HZ_PER_MEL, above)


def _windows(wave: Floats, size: int, hop: int) -> Floats:
    return np.lib.stride_tricks.sliding_window_view(wave, size)[::hop]


def _hann(size: int) -> Floats:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)


def _need(wave: Wave, samples: int) -> None:
    if wave.ndim != 1 or len(wave) < samples:
        raise ValueError(f"the waveform has shape {wave.shape}; one of at least ({samples},) is needed")
