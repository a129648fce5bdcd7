import json
from pathlib import Path

import pytest
from tokenizers import decoders

from backends.cosyvoice.ids import END_OF_PROMPT_ID, TEXT_ROWS
from backends.cosyvoice.tokenizer import FOLDER, Tokenizer, read_vocabulary
from backends.errors import BackendUnavailable
from tests.tiny_cosyvoice import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / FOLDER)
    return tmp_path / FOLDER


def test_the_end_of_prompt_has_the_id_that_the_model_was_trained_with(folder: Path) -> None:
    assert Tokenizer(read_vocabulary(folder)).encode("a<|endofprompt|>b")[1] == END_OF_PROMPT_ID


def test_extra_tokens_that_the_files_do_not_name_follow_in_the_official_order(folder: Path) -> None:
    tokenizer = Tokenizer(read_vocabulary(folder))
    assert tokenizer.encode("[breath]<strong></strong>[noise][laughter]") == (151647, 151648, 151649, 151650, 151651)
    assert tokenizer.encode("[ǜ]") == (tokenizer.size - 1,)
    assert tokenizer.size < TEXT_ROWS


def test_an_id_in_the_files_wins(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["151700"] = {"content": "[laughter]"}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(read_vocabulary(folder))
    assert tokenizer.encode("[laughter]") == (151700,)
    assert tokenizer.encode("[breath]") == (151701,)


@pytest.mark.parametrize("text", ["", "the thing in there", "Ünïcödé — 你好 😀 ok", "line\n\n  two ", "don't 12345"])
def test_bytes_survive_whatever_the_text(folder: Path, text: str) -> None:
    vocabulary = read_vocabulary(folder)
    names = {id: name for name, id in vocabulary.tokens.items()}
    ids = Tokenizer(vocabulary).encode(text)
    assert decoders.ByteLevel().decode([names[id] for id in ids]) == text


def test_words_are_merged_in_the_order_of_the_merges(folder: Path) -> None:
    vocabulary = read_vocabulary(folder)
    names = {id: name for name, id in vocabulary.tokens.items()}
    assert [names[id] for id in Tokenizer(vocabulary).encode("bathe the thing")] == [
        *("b", "a", "the"),
        "Ġthe",
        *("Ġ", "th", "ing"),
    ]


def test_one_tokenizer_json_says_the_same_as_three_files(folder: Path, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(folder)
    single = tmp_path / "single"
    single.mkdir()
    content = {
        "model": {"vocab": dict(vocabulary.tokens), "merges": [merge.split(" ") for merge in vocabulary.merges]},
        "added_tokens": [{"content": name, "id": id} for name, id in vocabulary.special.items()],
    }
    (single / "tokenizer.json").write_text(json.dumps(content))
    assert read_vocabulary(single) == vocabulary


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BackendUnavailable, match=name):
        read_vocabulary(folder)


def test_a_truncated_file_is_an_error_that_names_the_folder(folder: Path) -> None:
    (folder / "vocab.json").write_text('{"a": 1,')
    with pytest.raises(BackendUnavailable, match=FOLDER):
        read_vocabulary(folder)


def test_the_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": {"content": "<|endofprompt|>"}}}')
    with pytest.raises(BackendUnavailable, match=r"has the id 5 here, CosyVoice3 needs 151646"):
        read_vocabulary(folder)
