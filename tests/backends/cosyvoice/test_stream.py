"""The hand-over of tokens between two threads. A gate is a thread that is known to wait, never a pause."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cosyvoice.stream import TokenStream
from backends.errors import Cancelled, SynthesisFailed

Result = TypeVar("Result")


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Result]], Future[Result]]]:
    """Runs a function in another thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool.submit


def test_a_reader_gets_all_tokens_so_far() -> None:
    stream = TokenStream()
    stream.put(4)
    stream.put(5)
    assert stream.wait(1) == ((4, 5), False)


def test_a_reader_waits_until_there_are_enough_tokens(elsewhere) -> None:
    stream = TokenStream()
    stream.put(4)
    waiting = elsewhere(lambda: stream.wait(2))
    assert not waiting.done()
    stream.put(5)
    assert waiting.result() == ((4, 5), False)


def test_the_end_wakes_a_reader_who_wants_more(elsewhere) -> None:
    stream = TokenStream()
    stream.put(4)
    waiting = elsewhere(lambda: stream.wait(100))
    stream.close()
    assert waiting.result() == ((4,), True)


def test_an_error_reaches_the_reader_and_not_a_clean_end(elsewhere) -> None:
    stream = TokenStream()
    waiting = elsewhere(lambda: stream.wait(1))
    stream.close(SynthesisFailed("no decoding today"))
    with pytest.raises(SynthesisFailed, match="no decoding today"):
        waiting.result()


def test_an_error_is_raised_even_if_there_are_enough_tokens() -> None:
    stream = TokenStream()
    stream.put(4)
    stream.close(SynthesisFailed("late"))
    with pytest.raises(SynthesisFailed):
        stream.wait(1)


def test_only_the_first_ending_counts() -> None:
    stream = TokenStream()
    stream.close(SynthesisFailed("first"))
    stream.close()
    with pytest.raises(SynthesisFailed, match="first"):
        stream.wait(0)


def test_a_reader_who_leaves_stops_the_writer() -> None:
    stream = TokenStream()
    stream.cancel()
    assert stream.cancelled
    with pytest.raises(Cancelled):
        stream.put(4)


def test_leaving_wakes_a_reader_in_another_thread(elsewhere) -> None:
    stream = TokenStream()
    waiting = elsewhere(lambda: stream.wait(1))
    stream.cancel()
    with pytest.raises(Cancelled):
        waiting.result()


def test_a_token_after_the_end_is_a_mistake_of_the_writer() -> None:
    stream = TokenStream()
    stream.close()
    with pytest.raises(RuntimeError):
        stream.put(4)


@settings(deadline=None, max_examples=30)
@given(tokens=st.lists(st.integers(0, 6560), max_size=200), steps=st.lists(st.integers(1, 40), min_size=1))
def test_no_token_is_lost_or_seen_twice_whatever_the_reader_waits_for(tokens: list[int], steps: list[int]) -> None:
    stream = TokenStream()

    def write() -> None:
        for token in tokens:
            stream.put(token)
        stream.close()

    writer = threading.Thread(target=write)
    writer.start()
    seen: tuple[int, ...] = ()
    done = False
    while not done:
        more, done = stream.wait(len(seen) + steps[len(seen) % len(steps)])
        assert more[: len(seen)] == seen
        seen = tuple(more)
    writer.join()
    assert seen == tuple(tokens)
