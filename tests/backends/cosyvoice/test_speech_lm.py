"""The language model on llama.cpp, with a tiny random model in both layouts."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from backends.cosyvoice.ids import SPEECH_CODES, SPEECH_ROWS, TEXT_ROWS
from backends.cosyvoice.layout import read_layout
from backends.cosyvoice.sampling import length_limits
from backends.cosyvoice.speech_lm import LMPrompt, SpeechLM, open_speech_lm
from backends.errors import BackendUnavailable, Cancelled, InvalidInput

TEXT = tuple(range(40, 80))
PROMPT = LMPrompt(TEXT, constant=29, spoken=11, speech=(5, 6, 7))


def never() -> bool:
    return False


def after(calls: int) -> Callable[[], bool]:
    """A flag that turns true when it has been asked so many times."""
    count = itertools.count(1)
    return lambda: next(count) > calls


def open_tiny(path: Path, context: int = 1024) -> SpeechLM:
    return open_speech_lm(path, context=context, threads=1, gpu_layers=0, kept_bytes=1 << 20)


@pytest.fixture(params=["speech", "merged"])
def lm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[SpeechLM]:
    model = open_tiny(tiny_model / f"cosyvoice3-{request.param}-f16.gguf")
    yield model
    model.close()


@pytest.fixture
def speech_lm(tiny_model: Path) -> Iterator[SpeechLM]:
    model = open_tiny(tiny_model / "cosyvoice3-speech-f16.gguf")
    yield model
    model.close()


def tokens(lm: SpeechLM, prompt: LMPrompt = PROMPT, seed: int = 1) -> list[int]:
    return list(lm.generate(prompt, seed=seed, stopped=never))


def test_both_layouts_give_the_same_tokens_from_the_same_seed(tiny_model: Path) -> None:
    spoken = []
    for layout in ("speech", "merged"):
        model = open_tiny(tiny_model / f"cosyvoice3-{layout}-f16.gguf")
        spoken.append([tokens(model, seed=seed) for seed in range(4)])
        model.close()
    assert spoken[0] == spoken[1]


def test_tokens_are_codes_and_as_many_as_the_text_allows(lm: SpeechLM) -> None:
    fewest, most = length_limits(PROMPT.spoken)
    for seed in range(5):
        spoken = tokens(lm, seed=seed)
        assert fewest <= len(spoken) <= most
        assert all(0 <= token < SPEECH_CODES for token in spoken)


def test_a_seed_gives_the_same_tokens_whatever_ran_before(lm: SpeechLM) -> None:
    cold = tokens(lm)
    tokens(lm, LMPrompt(TEXT[::-1], constant=5, spoken=3), seed=9)
    assert tokens(lm) == cold  # its constant part comes back from the kept states
    assert tokens(lm) == cold  # and now lies in the context already


def test_a_warmed_prompt_gives_the_same_tokens_as_a_cold_one(tiny_model: Path) -> None:
    spoken = []
    for warm in (False, True):
        model = open_tiny(tiny_model / "cosyvoice3-speech-f16.gguf")
        if warm:
            model.warm(PROMPT)
        spoken.append(tokens(model))
        model.close()
    assert spoken[0] == spoken[1]


def test_other_seeds_give_other_tokens(speech_lm: SpeechLM) -> None:
    assert tokens(speech_lm, seed=1) != tokens(speech_lm, seed=2)


def test_every_part_of_the_prompt_matters(speech_lm: SpeechLM) -> None:
    others = [
        LMPrompt((41, *TEXT[1:]), PROMPT.constant, PROMPT.spoken, PROMPT.speech),
        LMPrompt((*TEXT[:-1], 40), PROMPT.constant, PROMPT.spoken, PROMPT.speech),
        LMPrompt(TEXT, PROMPT.constant, PROMPT.spoken, (5, 6, 8)),
    ]
    expected = tokens(speech_lm)
    assert all(tokens(speech_lm, other) != expected for other in others)


def test_a_prompt_longer_than_one_computation_is_read_in_parts(lm: SpeechLM) -> None:
    long = LMPrompt(tuple(np.random.default_rng(0).integers(0, 250, 900)), constant=4, spoken=3)
    assert len(tokens(lm, long)) >= length_limits(3)[0]


def test_tokens_are_handed_out_before_the_next_is_made(lm: SpeechLM) -> None:
    asked = []
    generation = lm.generate(PROMPT, seed=1, stopped=lambda: bool(asked.append(1)))
    next(generation)
    before = len(asked)
    next(generation)
    assert len(asked) == before + 1
    generation.close()


def test_a_generation_that_is_left_alone_gives_the_model_free(lm: SpeechLM) -> None:
    expected = tokens(lm)
    generation = lm.generate(PROMPT, seed=3, stopped=never)
    next(generation)
    generation.close()
    assert tokens(lm) == expected


def test_cancelled_while_the_prompt_is_read_and_whole_again_after(lm: SpeechLM) -> None:
    expected = tokens(lm)
    fresh = LMPrompt(TEXT[::-1], constant=29, spoken=11)
    for calls in (1, 5, 60):  # before, and inside llama.cpp's computation of either part
        with pytest.raises(Cancelled, match="prompt was read"):
            next(lm.generate(fresh, seed=1, stopped=after(calls)))
        assert tokens(lm) == expected


def test_cancelled_between_two_tokens(lm: SpeechLM) -> None:
    generation = lm.generate(PROMPT, seed=1, stopped=(flag := []).__len__)
    next(generation)
    flag.append(True)
    with pytest.raises(Cancelled, match="tokens were made"):
        next(generation)


def test_one_generation_at_a_time(lm: SpeechLM) -> None:
    first = lm.generate(PROMPT, seed=1, stopped=never)
    spoken = [next(first)]
    with ThreadPoolExecutor(max_workers=1) as pool:
        second = pool.submit(tokens, lm, PROMPT, 2)
        spoken += list(first)
        other = second.result()
    assert spoken == tokens(lm, seed=1)
    assert other == tokens(lm, seed=2)


def test_who_waits_for_another_generation_can_be_cancelled(lm: SpeechLM) -> None:
    running = lm.generate(PROMPT, seed=1, stopped=never)
    next(running)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(list, lm.generate(PROMPT, seed=2, stopped=after(2)))
        with pytest.raises(Cancelled, match="another generation"):
            waiting.result()
    running.close()


def test_a_text_without_tokens_is_silence(lm: SpeechLM) -> None:
    assert tokens(lm, LMPrompt(TEXT, constant=40, spoken=0)) == []


def test_a_prompt_that_leaves_no_room_for_the_answer_is_the_caller_s_fault(tiny_model: Path) -> None:
    model = open_tiny(tiny_model / "cosyvoice3-speech-f16.gguf", context=256)
    with pytest.raises(InvalidInput, match="positions") as caught:
        next(model.generate(LMPrompt(TEXT * 6, constant=4, spoken=100), seed=1, stopped=never))
    assert caught.value.param == "input"
    model.close()


def test_an_answer_ends_where_the_context_does(tiny_model: Path) -> None:
    model = open_tiny(tiny_model / "cosyvoice3-speech-f16.gguf", context=256)
    spoken = [tokens(model, LMPrompt(TEXT * 3, constant=4, spoken=60), seed=seed) for seed in range(3)]
    assert all(len(each) <= 256 - 120 - 2 for each in spoken)
    model.close()


def test_layouts_are_told_apart_by_the_file(tiny_model: Path) -> None:
    speech = read_layout(tiny_model / "cosyvoice3-speech-f16.gguf")
    assert (speech.text_rows, speech.first_row, speech.speech_rows) == (TEXT_ROWS, 0, SPEECH_ROWS)
    assert speech.embeddings is not None
    merged = read_layout(tiny_model / "cosyvoice3-merged-f16.gguf")
    assert (merged.text_rows, merged.first_row, merged.speech_rows) == (TEXT_ROWS, TEXT_ROWS, SPEECH_ROWS)
    assert merged.embeddings is None


def write_vocabulary(
    path: Path, rows: int, names: dict[int, str] | None, architecture: str = "qwen2", offset: str = ""
) -> Path:
    """A GGUF with a vocabulary and no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(rows)
    if offset:
        writer.add_string("cosyvoice3.speech_offset", offset)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    if names is None:
        writer.add_tokenizer_model("none")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([names.get(id, f"t_{id}_") for id in range(rows)])
        writer.add_token_types([1] * rows)
        writer.add_token_merges(["a b"])
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_offset_of_a_merged_vocabulary_is_found_by_its_names(tmp_path: Path) -> None:
    names = {300 + code: f"<|s_{code}|>" for code in range(SPEECH_CODES)}
    layout = read_layout(write_vocabulary(tmp_path / "other.gguf", 300 + 6784, names))
    assert (layout.text_rows, layout.first_row, layout.speech_rows) == (300, 300, SPEECH_ROWS)


def test_an_offset_that_the_metadata_tells_wins(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "told.gguf", 500 + SPEECH_ROWS, None, offset="500")
    assert read_layout(path).first_row == 500
    with pytest.raises(BackendUnavailable, match=r"nonsense.gguf: cosyvoice3.speech_offset is 'x'"):
        read_layout(write_vocabulary(tmp_path / "nonsense.gguf", 7000, None, offset="x"))


def test_without_names_the_offset_is_the_usual_one(tmp_path: Path) -> None:
    layout = read_layout(write_vocabulary(tmp_path / "plain.gguf", TEXT_ROWS + SPEECH_ROWS, None))
    assert layout.first_row == TEXT_ROWS


def test_a_model_of_another_architecture_is_named(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "llama.gguf", 400, None, architecture="llama")
    with pytest.raises(BackendUnavailable, match=r"llama.gguf: a model of architecture 'llama'.*qwen2.*convert"):
        open_tiny(path)


def test_an_ordinary_qwen2_is_told_from_ours(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "chat.gguf", TEXT_ROWS, None)
    with pytest.raises(BackendUnavailable, match=r"chat.gguf: a vocabulary of 151936 entries has no room for speech"):
        open_tiny(path)


@pytest.mark.parametrize("size", [0, 2, 200, 20000, -1000])
def test_a_truncated_gguf_is_named(tiny_model: Path, tmp_path: Path, size: int) -> None:
    whole = (tiny_model / "cosyvoice3-speech-f16.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:size])
    with pytest.raises(BackendUnavailable, match=r"short.gguf"):
        open_tiny(tmp_path / "short.gguf")


def test_a_missing_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"gone.gguf: cannot be read \(No such file"):
        open_tiny(tmp_path / "gone.gguf")


def copy_speech_layout(tiny_model: Path, to: Path) -> Path:
    for name in ("cosyvoice3-speech-f16.gguf", "cosyvoice3-speech-f16.embeddings.npy"):
        (to / name).symlink_to(tiny_model / name)
    return to / "cosyvoice3-speech-f16.gguf"


def test_missing_or_truncated_embeddings_are_named(tiny_model: Path, tmp_path: Path) -> None:
    path = copy_speech_layout(tiny_model, tmp_path)
    embeddings = tmp_path / "cosyvoice3-speech-f16.embeddings.npy"
    content = embeddings.read_bytes()
    embeddings.unlink()
    with pytest.raises(BackendUnavailable, match=r"embeddings.npy"):
        open_tiny(path)
    embeddings.write_bytes(content[:5000])
    with pytest.raises(BackendUnavailable, match=r"embeddings.npy"):
        open_tiny(path)


def test_embeddings_of_another_conversion_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = copy_speech_layout(tiny_model, tmp_path)
    embeddings = tmp_path / "cosyvoice3-speech-f16.embeddings.npy"
    table = np.load(embeddings).copy()
    embeddings.unlink()
    table[3] += 1
    np.save(embeddings, table)
    with pytest.raises(BackendUnavailable, match="does not belong to"):
        open_tiny(path)
