"""The golden data of the published model, computed with small random weights: tests/data/cosyvoice3."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parent / "data" / "cosyvoice3"
FLOW = DATA / "tiny" / "flow.pt"
HIFT = DATA / "tiny" / "hift.pt"
PROMPT_TOKENS = 40
TOKENS = 137


def golden(case: str, name: str) -> Tensor:
    """One array of one case."""
    with np.load(DATA / "golden" / f"{case}.npz") as arrays:
        return torch.from_numpy(arrays[name])


def tokens() -> list[int]:
    """The speech tokens of the golden utterance, 137 of them."""
    return [int(token) for token in golden("inputs", "token")[0]]


class GoldenSourceNoise:
    """The noise that all golden audio was made with."""

    def __init__(self) -> None:
        self._rows = golden("noise", "sine_waves")[0]

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows[start:stop]


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Of two tensors of one shape."""
    assert left.shape == right.shape
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """RMS of the difference over RMS of what was wanted."""
    assert found.shape == wanted.shape
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
