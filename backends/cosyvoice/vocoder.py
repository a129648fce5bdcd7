"""Mel frames to audio, at constant cost per chunk.

480 samples for each frame. Without the end in sight the last eight frames are held back: three look ahead for the
pitch, four for the decoder, and one keeps the inverse transform away from the edge. One pass over a whole mel is a
`start` and a single final `step`; audio that came in steps equals it.

Reflections (at the first sample of the source's transform and of the last stage) exist at the true start and end
only. Time indices are absolute; the voice's prompt does not count here.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.cosyvoice.hift import (
    BINS,
    DECODER_LOOK_AHEAD,
    FFT,
    HARMONICS,
    HOP,
    MAGNITUDE_LIMIT,
    MELS,
    PITCH_LOOK_AHEAD,
    SAMPLE_RATE,
    HiFT,
    Tails,
)
from backends.cosyvoice.noise import SeededSourceNoise, SourceNoise

FRAME_SAMPLES = 480
FRAME_COLUMNS = FRAME_SAMPLES // HOP
AUDIO_LIMIT = 0.99
CENTRE = FFT // 2


def spectrum_basis() -> Tensor:
    """(16, 18): samples of a window -> real parts, then imaginary parts, of its transform (periodic Hann window)."""
    angles = 2 * math.pi / FFT * torch.arange(FFT, dtype=torch.float64)[:, None] * torch.arange(BINS)
    return torch.cat([angles.cos(), -angles.sin()], dim=1) * window()[:, None]


def inverse_basis() -> Tensor:
    """(18, 16): real and imaginary parts -> windowed samples."""
    angles = 2 * math.pi / FFT * torch.arange(BINS, dtype=torch.float64)[:, None] * torch.arange(FFT)
    twice = torch.full((BINS, 1), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1  # the constant and the highest frequency have no mirror image
    return torch.cat([angles.cos() * twice, -angles.sin() * twice]) / FFT * window()


def window() -> Tensor:
    """Periodic Hann, (16,) float64."""
    return torch.hann_window(FFT, periodic=True, dtype=torch.float64)


def overlap_add(parts: Tensor) -> Tensor:
    """Add windows that begin four samples apart: (columns, 16) -> (4 * (columns + 3),)."""
    columns, overlap = parts.shape[0], FFT // HOP
    out = parts.new_zeros(columns + overlap - 1, HOP)
    for index, quarter in enumerate(parts.view(columns, overlap, HOP).unbind(1)):  # (columns, 4) each
        out[index : index + columns] += quarter
    return out.flatten()


@dataclass(slots=True)
class VocoderState:
    """What one utterance has so far.

    `held` (80, up to 3): mel frames that the decoder may not see yet. `phase` (9,) float64. `source` (n,): samples
    from 8 before the next column on. `spectrum` (18, n): columns that the next samples overlap.
    """

    held: Tensor
    phase: Tensor
    source: Tensor
    spectrum: Tensor
    tails: Tails = field(default_factory=dict)
    pitch_frames: int = 0
    decoded_frames: int = 0
    emitted: int = 0
    finished: bool = False


class Vocoder:
    """Owns the weights, on one device, in float32 (float64 for tests); takes the network over."""

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        network: HiFT,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        noise: SourceNoise | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._noise = noise or SeededSourceNoise()
        # Pitch and phase need float64, which Apple's devices do not have.
        self._precise_device = torch.device("cpu") if self.device.type == "mps" else self.device
        self._network = network.requires_grad_(False)
        for part in network.children():  # each on its own: rounded to float32, the pitch's weights stay rounded
            if part is network.f0_predictor:
                part.to(self._precise_device, torch.float64)
            else:
                part.to(self._precise_device if part is network.m_source else self.device, dtype)
        self._forward = spectrum_basis().to(dtype).to(self.device)
        self._inverse = inverse_basis().to(dtype).to(self.device)
        self._envelope = window().square().to(dtype).to(self.device)

    def start(self) -> VocoderState:
        """The state of an utterance without audio yet."""
        empty = torch.empty(0, device=self.device, dtype=self.dtype)
        return VocoderState(
            held=empty.new_empty(MELS, 0),
            phase=torch.zeros(HARMONICS, device=self._precise_device, dtype=torch.float64),
            source=empty,
            spectrum=empty.new_empty(2 * BINS, 0),
        )

    @torch.inference_mode()
    def step(self, mel: Tensor, state: VocoderState, *, final: bool = False) -> tuple[Tensor, VocoderState]:
        """Add frames (80, T): the audio that can no longer change, (n,), on the vocoder's device.

        All steps so far give 480 * (frames - 8) samples, after the final one 480 * frames. The state that was passed
        in is used up. Raises ValueError after the final step.
        """
        if state.finished:
            raise ValueError("this utterance has had its final step")
        state.finished = final
        mel = mel.to(self.device, self.dtype)
        if final and not state.pitch_frames and not mel.shape[1] + state.held.shape[1]:
            return mel.new_empty(0), state
        state.source = torch.cat([state.source, self.excite(mel, state, final)])
        frames = torch.cat([state.held, mel], dim=1)  # (80, held + T)
        ready = frames.shape[1] if final else max(0, frames.shape[1] - PITCH_LOOK_AHEAD)
        state.held = frames[:, ready:].clone()
        x = F.pad(frames[None, :, :ready], (0, DECODER_LOOK_AHEAD if final else 0))
        x = self._network.conv_pre(x, state.tails)  # (1, channels, n)
        if not x.shape[-1]:
            return mel.new_empty(0), state
        first = state.decoded_frames == 0
        columns = self._source_columns(state, FRAME_COLUMNS * x.shape[-1] + first, first, final)
        spectrum = self._network.decode(x, columns[None], state.tails, first)[0]  # (18, columns)
        state.decoded_frames += x.shape[-1]
        return self._emit(spectrum, state, final), state

    def whole(self, mel: Tensor, *, final: bool = True) -> Tensor:
        """One pass over (80, T): (480 T,), or 480 (T - 8) samples without the end."""
        audio, _ = self.step(mel, self.start(), final=final)
        return audio

    @torch.inference_mode()
    def pitch(self, mel: Tensor, state: VocoderState, final: bool) -> Tensor:
        """Hz of the frames that are ready, (m,) float64."""
        precise = mel.to(self._precise_device).double()[None]  # in this order: Apple's devices cannot convert
        out: Tensor = self._network.f0_predictor(precise, state.tails, final)
        return out

    @torch.inference_mode()
    def excite(self, mel: Tensor, state: VocoderState, final: bool) -> Tensor:
        """The source of the frames that are ready, (480 m,)."""
        pitch = self.pitch(mel, state, final).to(self.dtype)  # (m,)
        begin = FRAME_SAMPLES * state.pitch_frames
        noise = self._noise.rows(begin, begin + FRAME_SAMPLES * len(pitch)).to(pitch)  # (480 m, 9)
        state.pitch_frames += len(pitch)
        source, state.phase = self._network.m_source(pitch, state.phase, noise)
        out: Tensor = source.to(self.device)
        return out

    def _source_columns(self, state: VocoderState, columns: int, first: bool, final: bool) -> Tensor:
        """The next columns of the source's transform, (18, columns)."""
        samples = state.source
        if first:
            samples = F.pad(samples[None], (CENTRE, 0), mode="reflect")[0]
        if final:
            samples = F.pad(samples[None], (0, CENTRE), mode="reflect")[0]
        windows = samples.unfold(0, FFT, HOP)[:columns]  # (columns, 16)
        state.source = samples[columns * HOP :].clone()
        return (windows @ self._forward).mT

    def _emit(self, spectrum: Tensor, state: VocoderState, final: bool) -> Tensor:
        """Audio from emitted to what is safe, given all columns that overlap it."""
        columns = torch.cat([state.spectrum, spectrum], dim=1)  # (18, kept + new)
        begin, end = state.emitted, FRAME_SAMPLES * (state.decoded_frames - (0 if final else 1))
        magnitude = columns[:BINS].exp().clamp(max=MAGNITUDE_LIMIT)
        phase = columns[BINS:].sin()
        parts = torch.cat([magnitude * phase.cos(), magnitude * phase.sin()]).mT @ self._inverse  # (columns, 16)
        envelope = overlap_add(self._envelope.expand(len(parts), -1))
        kept_from = begin // HOP - 1 if begin else 0  # index of the first column that is held
        offset = begin + CENTRE - kept_from * HOP
        part = slice(offset, offset + end - begin)
        audio = (overlap_add(parts)[part] / envelope[part]).clamp(-AUDIO_LIMIT, AUDIO_LIMIT)
        state.emitted = end
        next_from = end // HOP - 1 if end else 0
        state.spectrum = columns[:, next_from - kept_from :].clone()
        return audio
