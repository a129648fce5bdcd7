"""The vocoder's networks: pitch, harmonic source, and the decoder from mel to the spectrum of the audio.

All convolutions are causal, or look a few frames to the right at the very start of a network. Each keeps the inputs
that its next output still needs in `Tails`, so that a signal may come in pieces of any size: the same code is the one
pass over a whole signal, for which the tails start empty and end unused.

Attribute names are those of the published checkpoint, weight normalisation folded into `weight`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MELS = 80
SAMPLE_RATE = 24000
HARMONICS = 9
FFT = 16
BINS = FFT // 2 + 1
HOP = 4
UPSAMPLING = ((8, 16), (5, 11), (3, 7))
"""Factor and kernel of each stage."""
SOURCE_KERNELS = ((30, 15), (6, 3), (1, 1))
"""Kernel and stride that bring the source to the rate of each stage."""
KERNELS = (3, 7, 11)
SOURCE_BLOCK_KERNELS = (7, 7, 11)
DILATIONS = (1, 3, 5)
DECODER_LOOK_AHEAD = 4
PITCH_LOOK_AHEAD = 3
STAGE_SLOPE = 0.1
LAST_SLOPE = 0.01
SINE_LEVEL = 0.1
NOISE_LEVEL = 0.003
VOICED_ABOVE = 10.0
MAGNITUDE_LIMIT = 100.0

Tails = dict[int, Tensor]
"""By a convolution's slot: the inputs that its next outputs still need."""


@dataclass(frozen=True, slots=True)
class HiFTDims:
    """The sizes that differ between a published and a tiny network."""

    channels: int
    pitch_channels: int


class PiecewiseConv(nn.Conv1d):
    """A convolution over a signal that comes in pieces; `left` zeros stand before its first piece."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, left: int, stride: int = 1, dilation: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, dilation=dilation)
        self.left = left
        self.reach = (kernel - 1) * dilation + 1
        self.slot = 0

    def forward(self, x: Tensor, tails: Tails) -> Tensor:  # type: ignore[override]
        """(1, inputs, n) -> (1, outputs, m): as many outputs as have all their inputs."""
        tail = tails.get(self.slot)
        x = F.pad(x, (self.left, 0)) if tail is None else torch.cat([tail, x], dim=-1)  # (1, inputs, tail + n)
        count = max(0, (x.shape[-1] - self.reach) // self.stride[0] + 1)
        tails[self.slot] = x[..., count * self.stride[0] :].clone()
        if not count:
            return x.new_empty(1, self.out_channels, 0)
        return super().forward(x)


class Snake(nn.Module):
    """x + sin(a x)^2 / a, one a for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        return x + (x * alpha).sin().square() / (alpha + 1e-9)


class ResBlock(nn.Module):
    """Three dilated residual layers, (1, channels, n) -> the same."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            PiecewiseConv(channels, channels, kernel, left=(kernel - 1) * dilation, dilation=dilation)
            for dilation in DILATIONS
        )
        self.convs2 = nn.ModuleList(PiecewiseConv(channels, channels, kernel, left=kernel - 1) for _ in DILATIONS)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in DILATIONS)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in DILATIONS)

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for first_snake, first_conv, second_snake, second_conv in layers:
            x = x + second_conv(second_snake(first_conv(first_snake(x), tails)), tails)
        return x


class PitchPredictor(nn.Module):
    """Fundamental frequency of each mel frame in Hz; computed in float64, like the published model does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [PiecewiseConv(MELS, channels, PITCH_LOOK_AHEAD + 1, left=0), nn.ELU()]
        for _ in range(4):
            layers += [PiecewiseConv(channels, channels, 3, left=2), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, tails: Tails, final: bool) -> Tensor:
        """mel (1, 80, n) -> (m,): three frames later than they come in, all of them if final."""
        x = F.pad(mel, (0, PITCH_LOOK_AHEAD)) if final else mel
        for layer in self.condnet:
            x = layer(x, tails) if isinstance(layer, PiecewiseConv) else layer(x)  # (1, channels, m)
        out: Tensor = self.classifier(x[0].mT).squeeze(-1).abs()
        return out


class Source(nn.Module):
    """Nine harmonics of the pitch and a little noise, mixed to one signal.

    Each frame's value is held for its 480 samples: a staircase, not a sine, as the published weights expect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, pitch: Tensor, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """pitch (F,), phase (9,) float64: the sum over all frames before, noise (480 F, 9) -> (480 F,), new phase.

        The sum is kept in turns, in double and never reduced: reduced or in float32, its last bits would differ from
        those of one pass, and the sine of a phase of 1e5 shows them.
        """
        hold = noise.shape[0] // max(1, pitch.shape[0])
        harmonics = torch.arange(1, HARMONICS + 1, device=pitch.device, dtype=pitch.dtype)
        turns = (pitch[:, None] * harmonics / SAMPLE_RATE) % 1  # (F, 9), per sample
        sums = torch.cat([phase[None], turns.double()]).cumsum(dim=0)[1:]  # (F, 9)
        angle = sums.to(pitch.dtype) * 2 * torch.pi * hold
        voiced = (pitch > VOICED_ABOVE).to(pitch.dtype)[:, None]  # (F, 1)
        sine = SINE_LEVEL * angle.sin() * voiced
        level = voiced * NOISE_LEVEL + (1 - voiced) * (SINE_LEVEL / 3)
        held = sine.repeat_interleave(hold, dim=0) + level.repeat_interleave(hold, dim=0) * noise  # (480 F, 9)
        return self.l_linear(held).squeeze(-1).tanh(), sums[-1] if len(sums) else phase


class HiFT(nn.Module):
    """All weights of hift.pt, and the decoder."""

    def __init__(self, dims: HiFTDims) -> None:
        super().__init__()
        self.m_source = Source()
        self.f0_predictor = PitchPredictor(dims.pitch_channels)
        self.conv_pre = PiecewiseConv(MELS, dims.channels, DECODER_LOOK_AHEAD + 1, left=0)
        widths = [dims.channels // 2**stage for stage in range(len(UPSAMPLING) + 1)]
        self.ups = nn.ModuleList(
            PiecewiseConv(widths[stage], widths[stage + 1], kernel, left=kernel - 1)
            for stage, (_, kernel) in enumerate(UPSAMPLING)
        )
        self.source_downs = nn.ModuleList(
            PiecewiseConv(2 * BINS, width, kernel, stride=stride, left=stride - 1)
            for width, (kernel, stride) in zip(widths[1:], SOURCE_KERNELS, strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            ResBlock(width, kernel) for width, kernel in zip(widths[1:], SOURCE_BLOCK_KERNELS, strict=True)
        )
        self.resblocks = nn.ModuleList(ResBlock(width, kernel) for width in widths[1:] for kernel in KERNELS)
        self.conv_post = PiecewiseConv(widths[-1], 2 * BINS, 7, left=6)
        convs = (module for module in self.modules() if isinstance(module, PiecewiseConv))
        for slot, conv in enumerate(convs):
            conv.slot = slot

    def decode(self, x: Tensor, source: Tensor, tails: Tails, first: bool) -> Tensor:
        """Frames after conv_pre (1, channels, n) and source spectrum (1, 18, 120 n [+ 1 if first]) -> (1, 18, same).

        `first`: these are the first frames of the signal. Nine rows of log magnitude, nine whose sine is the phase.
        """
        last = len(UPSAMPLING) - 1
        for stage, (factor, _) in enumerate(UPSAMPLING):
            x = F.leaky_relu(x, STAGE_SLOPE).repeat_interleave(factor, dim=-1)
            x = self.ups[stage](x, tails)  # (1, width, n * factor)
            if stage == last and first:
                x = F.pad(x, (1, 0), mode="reflect")
            mixed = self.source_downs[stage](source, tails)  # (1, width, the same as x)
            x = x + self.source_resblocks[stage](mixed, tails)
            blocks = self.resblocks[stage * len(KERNELS) : (stage + 1) * len(KERNELS)]
            x = sum((block(x, tails) for block in blocks[1:]), start=blocks[0](x, tails)) / len(KERNELS)
        out: Tensor = self.conv_post(F.leaky_relu(x, LAST_SLOPE), tails)  # (1, 18, columns)
        return out
