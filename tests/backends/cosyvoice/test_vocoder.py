"""Mel to audio: golden cases (e) and (f), and that audio in steps equals audio in one pass."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.cosyvoice.checkpoint import load_hift_network, load_vocoder
from backends.cosyvoice.vocoder import Vocoder, inverse_basis, overlap_add, spectrum_basis, window
from tests.golden import HIFT, GoldenSourceNoise, golden, largest_difference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    return load_vocoder(HIFT, noise=GoldenSourceNoise())


@pytest.fixture(scope="module")
def precise() -> Vocoder:
    return load_vocoder(HIFT, dtype=torch.float64)


def case(frames: int, final: bool, name: str) -> Tensor:
    return golden("e_hift", f"T{frames}_{'final' if final else 'nofinal'}_{name}").squeeze()


def in_steps(vocoder: Vocoder, mel: Tensor, sizes: list[int]) -> list[Tensor]:
    """Audio of frames that come in pieces of these sizes, the rest last."""
    state, parts = vocoder.start(), []
    *pieces, last = mel.split([*sizes, mel.shape[1] - sum(sizes)], dim=1)
    for piece in pieces:
        audio, state = vocoder.step(piece, state)
        parts.append(audio)
    audio, _ = vocoder.step(last, state, final=True)
    return [*parts, audio]


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("frames", [90, 12])
def test_each_stage_is_the_golden_one(vocoder: Vocoder, frames: int, final: bool) -> None:
    mel = golden("e_hift", "mel")[0][:, :frames]
    pitch = vocoder.pitch(mel, vocoder.start(), final)
    assert pitch.dtype == torch.float64
    assert largest_difference(pitch, case(frames, final, "f0")) < 1e-3
    assert largest_difference(vocoder.excite(mel, vocoder.start(), final), case(frames, final, "source")) < 1e-5
    audio = vocoder.whole(mel, final=final)
    assert len(audio) == 480 * (frames if final else frames - 8)
    assert largest_difference(audio, case(frames, final, "audio")) < 1e-4


@pytest.mark.parametrize("final", [True, False])
def test_each_layer_of_the_decoder_is_the_golden_one(final: bool) -> None:
    network = load_hift_network(HIFT)
    seen: dict[str, Tensor] = {}
    layers = {
        "conv_pre": network.conv_pre,
        "up0": network.ups[0],
        "source_down0": network.source_downs[0],
        "source_resblock0": network.source_resblocks[0],
        **{f"resblock{index}": network.resblocks[index] for index in range(3)},
        "up1": network.ups[1],
        "up2": network.ups[2],
        "conv_post": network.conv_post,
    }

    def note(name: str) -> Any:
        return lambda _module, _inputs, output: seen.update({name: output})

    for name, layer in layers.items():
        layer.register_forward_hook(note(name))
    Vocoder(network, noise=GoldenSourceNoise()).whole(golden("e_hift", "mel")[0][:, :12], final=final)
    # The golden array of this name holds the sum of the three blocks: they were added up in its place.
    seen["resblock0"] = sum(seen.pop(f"resblock{index}") for index in range(3))
    for name, output in seen.items():
        assert largest_difference(output[0], case(12, final, name)) < 1e-4


def test_one_pass_over_the_golden_mel_is_the_golden_audio(vocoder: Vocoder) -> None:
    audio = vocoder.whole(golden("f_token2wav", "hop25_cached_mel")[0])
    assert largest_difference(audio, golden("f_token2wav", "hop25_audio").squeeze()) < 1e-4


def test_audio_in_steps_is_the_golden_one_chunk_by_chunk(vocoder: Vocoder) -> None:
    parts = in_steps(vocoder, golden("f_token2wav", "hop25_cached_mel")[0], [70, 50, 50, 50])
    lengths = golden("f_token2wav", "hop25_chunk_lengths").tolist()
    assert [len(part) for part in parts] == lengths
    wanted = golden("f_token2wav", "hop25_audio").squeeze().split(lengths)
    for part, chunk in zip(parts, wanted, strict=True):
        assert largest_difference(part, chunk) < 1e-4


@settings(deadline=None, max_examples=25)
@given(frames=st.integers(1, 70), sizes=st.lists(st.integers(0, 30), max_size=6))
def test_audio_in_any_steps_equals_one_pass(vocoder: Vocoder, frames: int, sizes: list[int]) -> None:
    mel = golden("e_hift", "mel")[0][:, :frames]
    parts = in_steps(vocoder, mel, shortened(sizes, frames))
    assert largest_difference(torch.cat(parts), vocoder.whole(mel)) < 1e-4


@settings(deadline=None, max_examples=10)
@given(frames=st.integers(1, 60), sizes=st.lists(st.integers(0, 30), max_size=6))
def test_it_does_to_the_last_digits_in_double_precision(precise: Vocoder, frames: int, sizes: list[int]) -> None:
    mel = golden("e_hift", "mel")[0][:, :frames]
    parts = in_steps(precise, mel, shortened(sizes, frames))
    assert largest_difference(torch.cat(parts), precise.whole(mel)) < 1e-9


def shortened(sizes: list[int], frames: int) -> list[int]:
    """As many of the sizes as fit."""
    while sum(sizes) > frames:
        sizes = sizes[:-1]
    return sizes


def test_eight_frames_are_held_back(vocoder: Vocoder) -> None:
    mel = golden("e_hift", "mel")[0]
    state, emitted = vocoder.start(), 0
    for frames in range(1, 20):
        audio, state = vocoder.step(mel[:, frames - 1 : frames], state)
        emitted += len(audio)
        assert emitted == 480 * max(0, frames - 8)


def test_the_phase_of_a_long_utterance_is_carried_exactly(vocoder: Vocoder) -> None:
    mel = golden("f_token2wav", "hop25_cached_mel")[0]
    seeded = load_vocoder(HIFT)
    long = mel.repeat(1, 4)
    state, parts = seeded.start(), []
    for piece in long.split(137, dim=1):
        parts.append(seeded.excite(piece, state, False))
    whole = seeded.excite(long, seeded.start(), False)
    assert largest_difference(torch.cat(parts), whole) < 1e-6


def test_there_is_no_longest_utterance() -> None:
    seeded = load_vocoder(HIFT)
    state = seeded.start()
    state.pitch_frames = 50 * 400  # as after 400 s
    assert len(seeded.excite(golden("e_hift", "mel")[0], state, True)) == 480 * 90


def test_no_frames_at_all_are_no_audio(vocoder: Vocoder) -> None:
    audio, state = vocoder.step(torch.empty(80, 0), vocoder.start())
    assert len(audio) == 0
    audio, _ = vocoder.step(torch.empty(80, 0), state, final=True)
    assert len(audio) == 0


def test_no_step_follows_the_final_one(vocoder: Vocoder) -> None:
    _, state = vocoder.step(golden("e_hift", "mel")[0], vocoder.start(), final=True)
    with pytest.raises(ValueError, match="final"):
        vocoder.step(torch.empty(80, 1), state)


def test_the_transforms_are_those_of_torch() -> None:
    signal = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = torch.stft(signal, 16, 4, window=window(), center=False, return_complex=True)
    found = (signal.unfold(0, 16, 4) @ spectrum_basis()).mT
    assert largest_difference(found, torch.cat([wanted.real, wanted.imag])) < 1e-12
    envelope = overlap_add(window().square().expand(len(found.mT), -1))
    back = overlap_add(found.mT @ inverse_basis())
    assert largest_difference(back[12:-12] / envelope[12:-12], signal[12:-12]) < 1e-12
