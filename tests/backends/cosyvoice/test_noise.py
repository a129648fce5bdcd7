"""The fixed noise: the published numbers for the flow, any uniform ones for the source, and no end."""

import hashlib
import json

import torch

from backends.cosyvoice.noise import SeededFlowNoise, SeededSourceNoise
from tests.golden import DATA


def test_the_flow_starts_from_the_published_noise() -> None:
    wanted = json.loads((DATA / "official_noise_check.json").read_text())["rand_noise"]["sha256_float32_le"]
    found = SeededFlowNoise().columns(0, 15000).numpy().astype("<f4").tobytes()
    assert hashlib.sha256(found).hexdigest() == wanted


def test_a_slice_is_a_part_of_the_whole() -> None:
    flow, source = SeededFlowNoise(), SeededSourceNoise()
    assert torch.equal(flow.columns(14990, 15010)[:, :10], flow.columns(14990, 15000))
    assert torch.equal(source.rows(0, 50000)[20000:30000], SeededSourceNoise().rows(20000, 30000))


def test_the_noise_of_a_later_time_is_the_same_each_time() -> None:
    begin = 400 * 24000
    assert torch.equal(SeededSourceNoise().rows(begin, begin + 100), SeededSourceNoise().rows(begin, begin + 100))
    assert SeededFlowNoise().columns(20000, 20050).shape == (80, 50)


def test_source_noise_is_uniform_between_0_and_1() -> None:
    rows = SeededSourceNoise().rows(0, 48000)
    assert rows.min() >= 0
    assert rows.max() < 1
    assert abs(float(rows.mean()) - 0.5) < 0.005


def test_no_samples_are_no_rows() -> None:
    assert SeededSourceNoise().rows(480, 480).shape == (0, 9)
    assert SeededFlowNoise().columns(50, 50).shape == (80, 0)
