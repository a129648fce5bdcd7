# ruff: noqa: RUF001
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.text import sentences, speakable

# Letters, ends, quotes, CJK, marks that join to a letter, and every kind of line end.
ALPHABET = "aB1é.!?…,;:—-'\"”()」。！你好、\u0301\U0001f600\u200d \n\r\t\u2028"


def letters(text: str) -> str:
    return "".join(text.split())


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=ALPHABET, max_size=200), st.integers(min_value=1, max_value=60))
def test_nothing_but_white_space_is_lost_or_moved(text: str, limit: int) -> None:
    pieces = sentences(text, limit)
    assert letters("".join(pieces)) == (letters(text) if speakable(text) else "")
    assert all(0 < len(piece) <= limit for piece in pieces)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=300))
def test_any_text_can_be_cut(text: str) -> None:
    assert letters("".join(sentences(text))) in ("", letters(text))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("What?! Really...", ["What?!", "Really..."]),
        ("She said “No.” Then she left.", ["She said “No.”", "Then she left."]),
        ('"Stop!" he said. "Why?" she asked.', ['"Stop!" he said.', '"Why?" she asked.']),
        ("(It rained.) We stayed.", ["(It rained.)", "We stayed."]),
        ("Well... maybe. Yahoo! is old.", ["Well... maybe.", "Yahoo! is old."]),
    ],
)
def test_sentences_end_at_marks_and_their_closing_quotes(text: str, pieces: list[str]) -> None:
    assert sentences(text) == pieces


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Smith met Mrs. Jones and Prof. Braun.",
        "J. R. R. Tolkien lived in St. Mary's.",
        "The U.S. Army, e.g. Company B, is big.",
        "See Fig. 3 and No. 5 on p. 12.",
        "On Jan. 5 it was warm.",
        "They sell apples, pears, etc. and more.",
        "Herr z.B. Schmidt kam mit Hr. Braun.",
    ],
)
def test_an_abbreviation_does_not_end_a_sentence(text: str) -> None:
    assert sentences(text) == [text]


def test_a_word_that_is_an_abbreviation_before_numbers_only_ends_a_sentence_else() -> None:
    assert sentences("No. I will not go. The fig. Yes.") == ["No.", "I will not go.", "The fig.", "Yes."]


def test_etc_and_pm_end_a_sentence_before_a_capital() -> None:
    assert sentences("We met at 5 p.m. Then we ate, drank, etc. He left.") == [
        "We met at 5 p.m.",
        "Then we ate, drank, etc.",
        "He left.",
    ]


@pytest.mark.parametrize("number", ["3.14", "1,250.50", "10.30 o'clock", "v1.2.3", "192.168.0.1", "example.com"])
def test_a_point_inside_a_number_or_name_ends_nothing(number: str) -> None:
    assert sentences(f"It is {number} now. Good.") == [f"It is {number} now.", "Good."]


def test_a_year_ends_a_sentence_and_a_list_number_does_not() -> None:
    assert sentences("He died in 1999. She lived.") == ["He died in 1999.", "She lived."]
    assert sentences("1. Buy milk\n2. Buy eggs\n- sleep\n- eat") == ["1. Buy milk", "2. Buy eggs", "- sleep", "- eat"]


def test_chinese_and_japanese_need_no_space_between_sentences() -> None:
    assert sentences("今天很好。明天呢？好！走吧") == ["今天很好。", "明天呢？", "好！", "走吧"]
    assert sentences("「行こう。」と彼は言った。走った。") == ["「行こう。」と彼は言った。", "走った。"]
    assert sentences("“走吧。”他说。然后走了。") == ["“走吧。”他说。", "然后走了。"]


def test_hindi_and_arabic_marks_end_sentences() -> None:
    assert sentences("यह एक है। यह दो है।") == ["यह एक है।", "यह दो है।"]
    assert sentences("كيف حالك؟ أنا بخير.") == ["كيف حالك؟", "أنا بخير."]


def test_a_blank_line_ends_a_sentence_and_so_does_the_end_of_a_short_line() -> None:
    assert sentences("Chapter One\n\nIt rained") == ["Chapter One", "It rained"]
    assert sentences("Chapter One\nIt rained") == ["Chapter One", "It rained"]


def test_a_wrapped_line_goes_on() -> None:
    assert sentences("It rained,\nand it\r\nrained.") == ["It rained, and it rained."]
    long = "This line was wrapped by an editor that stops in"
    assert sentences(f"{long} or near\nParis. Mr.\nBrown left.") == [f"{long} or near Paris.", "Mr. Brown left."]
    assert sentences("The exam-\nple\n") == ["The exam-ple"]
    assert sentences("今天天气很好，\n我们走吧。") == ["今天天气很好，我们走吧。"]


def test_what_cannot_be_spoken_goes_with_its_neighbour() -> None:
    assert sentences("***\n\nHello.\n\n---\n\nWorld.") == ["*** Hello. ---", "World."]


@pytest.mark.parametrize("text", ["", "  \n ", "...", "***\n---", "\U0001f600"])
def test_a_text_without_a_letter_has_no_pieces(text: str) -> None:
    assert sentences(text) == []


def test_money_and_per_cent_can_be_spoken() -> None:
    assert sentences("€!") == ["€!"]
    assert sentences("%") == ["%"]


def test_a_long_sentence_is_cut_at_its_last_clause_then_between_words_then_anywhere() -> None:
    assert sentences("Aaaa bbbb, cccc dddd eeee.", 15) == ["Aaaa bbbb,", "cccc dddd eeee."]
    assert sentences("aaaa bbbb cccc dddd", 10) == ["aaaa bbbb", "cccc dddd"]
    assert sentences("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]
    assert sentences("你好你好，你好你好你好。", 8) == ["你好你好，", "你好你好你好。"]


def test_a_cut_never_parts_a_letter_from_its_marks() -> None:
    assert sentences("e\u0301" * 6, 5) == ["e\u0301e\u0301"] * 3


def test_cutting_a_book_takes_time_in_proportion_to_its_length() -> None:
    book = "He said it was so, and it was. " * 20_000
    assert len(sentences(book)) == 20_000
    assert len(sentences("a.b" * 100_000, 300)) == 1000


def test_the_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="limit"):
        sentences("a", 0)
