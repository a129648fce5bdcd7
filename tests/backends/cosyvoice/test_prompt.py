from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cosyvoice.ids import END_OF_PROMPT_ID
from backends.cosyvoice.prompt import PIECE_TOKENS, Prompts, wetext_normalizer
from backends.cosyvoice.tokenizer import FOLDER, Tokenizer, read_vocabulary
from tests.tiny_cosyvoice import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer") / FOLDER
    write_tokenizer(folder)
    return Tokenizer(read_vocabulary(folder))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer)


def test_zero_shot_reads_the_transcript_before_the_text_and_the_voice_after_it(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    prompt = prompts.zero_shot("say this", "heard that", [7, 8, 9])
    before = tokenizer.encode("You are a helpful assistant.<|endofprompt|>heard that")
    text = tokenizer.encode("say this")
    assert (prompt.text, prompt.speech) == (before + text, (7, 8, 9))
    assert (prompt.constant, prompt.spoken) == (len(before), len(text))


def test_cross_lingual_counts_the_system_line_as_spoken(prompts: Prompts, tokenizer: Tokenizer) -> None:
    prompt = prompts.cross_lingual("say this")
    before = tokenizer.encode("You are a helpful assistant.<|endofprompt|>")
    assert (prompt.text, prompt.speech) == (before + tokenizer.encode("say this"), ())
    assert (prompt.constant, prompt.spoken) == (len(before), len(prompt.text))


def test_instruct2_reads_the_style_and_nothing_of_the_voice(prompts: Prompts, tokenizer: Tokenizer) -> None:
    prompt = prompts.instruct2("say this", " Please whisper. ")
    before = tokenizer.encode("You are a helpful assistant. Please whisper.<|endofprompt|>")
    assert (prompt.text, prompt.speech) == (before + tokenizer.encode("say this"), ())
    assert (prompt.constant, prompt.spoken) == (len(before), len(prompt.text) - len(before))


def test_every_mode_has_the_end_of_prompt_that_the_model_needs(prompts: Prompts) -> None:
    for prompt in (prompts.zero_shot("a", "b", [1]), prompts.cross_lingual("a"), prompts.instruct2("a", "c")):
        assert prompt.text[: prompt.constant].count(END_OF_PROMPT_ID) == 1


@pytest.mark.parametrize("text", ["", "   ", "...", "?!", "— … —"])
def test_a_text_with_nothing_to_say_has_no_pieces(prompts: Prompts, text: str) -> None:
    assert prompts.split(text) == []


def test_sentences_are_joined_while_they_fit_into_a_piece(prompts: Prompts) -> None:
    pieces = prompts.split("This is a short sentence. " * 12)
    assert len(pieces) > 1
    assert all(prompts.count(piece) <= PIECE_TOKENS for piece in pieces)
    assert all(prompts.count(piece + " This is a short sentence.") > PIECE_TOKENS for piece in pieces[:-1])


def test_a_long_sentence_is_cut_between_words(prompts: Prompts) -> None:
    words = [f"word{number}" for number in range(80)]
    pieces = prompts.split(" ".join(words))
    assert [word for piece in pieces for word in piece.split()] == words


def test_chinese_sentences_are_joined_without_a_space(prompts: Prompts) -> None:
    assert prompts.split("你好。我很好。") == ["你好。我很好。"]


def test_a_text_with_markers_is_left_as_it_is(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, str.upper)
    text = "First. <|endofprompt|>" + "and then. " * 30
    assert prompts.split(text) == [text]


def test_each_sentence_is_made_speakable_before_its_tokens_are_counted(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, lambda sentence: sentence.replace("3", "three " * 39 + "three"))
    pieces = prompts.split("I have 3. So it is.")
    assert " ".join(pieces) == "I have " + "three " * 39 + "three. So it is."
    assert all(prompts.count(piece) <= PIECE_TOKENS for piece in pieces)


def test_the_normaliser_is_optional() -> None:
    normalize = wetext_normalizer()
    assert normalize is None or normalize("It is 5 pm.") != ""


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=400))
def test_no_piece_is_too_long_and_nothing_but_white_space_is_lost(prompts: Prompts, text: str) -> None:
    text = text.replace("<|", "")
    pieces = prompts.split(text)
    assert all(prompts.count(piece) <= PIECE_TOKENS for piece in pieces)
    if pieces:
        assert "".join("".join(pieces).split()) == "".join(text.split())
