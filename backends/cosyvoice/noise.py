"""The fixed noise of the flow and of the vocoder's source.

Both networks start from noise that is the same for every request: column n of the flow's and sample n of the source's
never change, so that a piece does not depend on how the speech was cut. It is made when it is first needed, and there
is no length at which it ends.
"""

from typing import Protocol

import torch
from torch import Tensor

MELS = 80
COLUMNS = 15000
"""Width of the draw that the published model uses: 300 s."""
BLOCK_SAMPLES = 24000
KEPT_BLOCKS = 32


class FlowNoise(Protocol):
    """Where the flow's starting point comes from."""

    def columns(self, start: int, stop: int) -> Tensor:
        """Standard normal noise, (80, stop - start) float32 on the CPU, the prompt's frames counted."""
        ...


class SourceNoise(Protocol):
    """Where the noise of the vocoder's source comes from."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Uniform noise in [0, 1), (stop - start, 9) float32 on the CPU, the prompt not counted."""
        ...


class SeededFlowNoise:
    """The published model's noise for the first 300 s, and further draws of the same size behind it.

    One normal draw of (80, 15000) by torch's CPU generator with seed 0. A narrower draw with that seed holds other
    numbers, so it is made whole (4.8 MB), once.
    """

    def __init__(self) -> None:
        self._draws: dict[int, Tensor] = {}

    def columns(self, start: int, stop: int) -> Tensor:
        """Implements `FlowNoise`."""
        parts = []
        for draw in range(start // COLUMNS, -(-stop // COLUMNS)):
            first, last = max(start - draw * COLUMNS, 0), min(stop - draw * COLUMNS, COLUMNS)
            parts.append(self._draw(draw)[:, first:last])
        return torch.cat(parts, dim=1) if parts else torch.empty(MELS, 0)

    def _draw(self, index: int) -> Tensor:
        if index not in self._draws:
            generator = torch.Generator().manual_seed(index)
            # (1, 80, 15000), the shape of the published draw: the numbers depend on it.
            self._draws[index] = torch.randn(1, MELS, COLUMNS, generator=generator)[0]
        return self._draws[index]


class SeededSourceNoise:
    """Uniform noise in blocks of one second, block b drawn with seed b. The first 32 blocks are kept (28 MB).

    Not the stream that the published code draws (290 MB at once): any fixed uniform noise sounds the same.
    """

    def __init__(self, harmonics: int = 9) -> None:
        self._harmonics = harmonics
        self._blocks: dict[int, Tensor] = {}

    def rows(self, start: int, stop: int) -> Tensor:
        """Implements `SourceNoise`."""
        parts = []
        for index in range(start // BLOCK_SAMPLES, -(-stop // BLOCK_SAMPLES)):
            first, last = max(start - index * BLOCK_SAMPLES, 0), min(stop - index * BLOCK_SAMPLES, BLOCK_SAMPLES)
            parts.append(self._block(index)[first:last])
        return torch.cat(parts) if parts else torch.empty(0, self._harmonics)

    def _block(self, index: int) -> Tensor:
        block = self._blocks.get(index)
        if block is None:
            generator = torch.Generator().manual_seed(index)
            block = torch.rand(BLOCK_SAMPLES, self._harmonics, generator=generator)
            if index < KEPT_BLOCKS:
                self._blocks[index] = block
        return block
