"""The order `fifo`, and what both orders share."""

import pytest

from proxy.line import Line, Ticket
from tests.proxy.lines import FIFO, PHASES, holds, join, none, read, waits, write


def test_readers_hold_together() -> None:
    line = Line(FIFO)
    first, second = read(), read()
    assert list(line.join(first, 0)) == [first]
    assert list(line.join(second, 0)) == [second]


def test_a_writer_holds_alone() -> None:
    line = Line(FIFO)
    writer, reader, other = write(), read(), write()
    join(line, [writer, reader, other])
    assert holds(writer)
    assert waits(reader, other)


def test_a_reader_behind_a_waiting_writer_waits() -> None:
    line = Line(FIFO)
    running, writer, late = read(), write(), read()
    join(line, [running, writer, late])
    assert waits(writer, late)
    assert list(line.leave(running, 1)) == [writer]
    assert list(line.leave(writer, 2)) == [late]


def test_a_later_writer_does_not_pass_an_earlier_reader() -> None:
    line = Line(FIFO)
    running, reader, writer = write(), read(), write()
    join(line, [running, reader, writer])
    assert list(line.leave(running, 1)) == [reader]
    assert waits(writer)


def test_readers_at_the_head_enter_together() -> None:
    line = Line(FIFO)
    writer, *readers = write(), read(), read("vision"), read()
    join(line, [writer, *readers])
    assert set(line.leave(writer, 1)) == set(readers)


def test_readers_between_two_writers_enter_between_them() -> None:
    line = Line(FIFO)
    running, early, writer, late = write(), read(), write(), read()
    join(line, [running, early, writer, late])
    assert list(line.leave(running, 1)) == [early]
    assert list(line.leave(early, 2)) == [writer]
    assert list(line.leave(writer, 3)) == [late]


def test_a_writer_that_gives_up_lets_in_the_readers_it_held_back() -> None:
    line = Line(FIFO)
    running, writer, late = read(), write(), read()
    join(line, [running, writer, late])
    assert list(line.leave(writer, 1)) == [late]


def test_one_who_gives_up_behind_the_head_changes_nothing() -> None:
    line = Line(FIFO)
    running, first, second, third = write(), read(), read(), read()
    join(line, [running, first, second, third])
    assert list(line.leave(second, 1)) == []
    assert list(line.leave(running, 2)) == [first, third]


def test_mode_none_waits_for_nobody_and_keeps_nobody_waiting() -> None:
    line = Line(FIFO)
    writer, waiting, embedding, other = write(), write(), none(), none()
    join(line, [writer, waiting, embedding])
    assert holds(embedding)
    assert list(line.leave(writer, 1)) == [waiting]
    join(line, [other])
    assert holds(waiting, other)


def test_limit_counts_the_tickets_of_one_model_in_every_mode() -> None:
    line = Line(FIFO)
    first, second, third = read("q", limit=2), none("q", limit=2), read("q", limit=2)
    join(line, [first, second, third])
    assert waits(third)
    assert list(line.leave(second, 1)) == [third]


def test_a_ticket_held_back_by_its_limit_keeps_no_reader_of_another_model_waiting() -> None:
    line = Line(FIFO)
    running, limited, other = read("q", limit=1), read("q", limit=1), read("v")
    join(line, [running, limited, other])
    assert waits(limited)
    assert holds(other)


def test_a_writer_does_not_pass_an_older_reader_held_back_by_its_limit() -> None:
    line = Line(FIFO)
    embedding, limited, writer = none("q", limit=1), read("q", limit=1), write()
    join(line, [embedding, limited, writer])
    assert waits(limited, writer)
    assert list(line.leave(embedding, 1)) == [limited]


def test_readers_held_back_by_their_limit_do_not_starve_a_writer() -> None:
    line = Line(FIFO)
    running, older, writer, younger = read("q", limit=1), read("q", limit=1), write(), read("q", limit=1)
    join(line, [running, older, writer, younger])
    assert list(line.leave(running, 1)) == [older]
    assert list(line.leave(older, 2)) == [writer]
    assert list(line.leave(writer, 3)) == [younger]


def test_leaving_twice_is_refused() -> None:
    line = Line(FIFO)
    ticket = read()
    line.join(ticket, 0)
    line.leave(ticket, 1)
    with pytest.raises(ValueError, match="not in line"):
        line.leave(ticket, 2)


def test_the_times_of_a_ticket_are_those_of_its_line() -> None:
    line = Line(FIFO)
    running, ticket = write(), write()
    line.join(running, 1.0)
    line.join(ticket, 2.0)
    line.leave(running, 5.0)
    line.opened(ticket, 6.0)
    line.leave(ticket, 7.0)
    assert (ticket.arrived, ticket.granted, ticket.opened, ticket.released) == (2.0, 5.0, 6.0, 7.0)


def test_other_rules_let_in_whom_they_allow() -> None:
    class Nothing:
        def id(self, model: str) -> str:
            return model

        def admits(self, held: frozenset[str], model: str) -> bool:
            return held <= {model}

        def hinders(self, held: frozenset[str], waiter: str, newcomer: str) -> bool:
            return waiter != newcomer

        def after(self, resident: frozenset[str], held: frozenset[str], model: str) -> frozenset[str]:
            return frozenset({model})

        def words(self) -> tuple[str, ...]:
            return ()

    line = Line(FIFO, Nothing())
    chat, vision = read("q"), read("v")
    join(line, [chat, vision])
    assert waits(vision)
    assert list(line.reconfigure(FIFO, None, 1.0)) == [vision]


@pytest.mark.parametrize("policy", [FIFO, PHASES])
def test_ten_times_the_waiters_look_at_no_more_heads(policy: object) -> None:
    """Counts, not seconds: how often a ticket's number is read while 1,000 and 10,000 wait and are served."""

    class Counted(Ticket):
        __slots__ = ()
        reads = 0

        def __getattribute__(self, name: str) -> object:
            if name == "number":
                Counted.reads += 1
            return super().__getattribute__(name)

    def reads_per_ticket(count: int) -> float:
        Counted.reads = 0
        line = Line(policy)  # type: ignore[arg-type]
        tickets = [
            Counted(str(i), "tts" if i % 10 == 0 else "chat", "g", write().mode if i % 10 == 0 else read().mode)
            for i in range(count)
        ]
        holding = [granted for ticket in tickets for granted in line.join(ticket, 0.0)]
        while holding:
            holding.extend(line.leave(holding.pop(), 0.0))
        assert all(ticket.released is not None for ticket in tickets)
        return Counted.reads / count

    assert reads_per_ticket(10_000) < 1.1 * reads_per_ticket(1_000)


def test_ten_thousand_waiters_can_give_up_in_any_order() -> None:
    line = Line(PHASES)
    running = write()
    line.join(running, 0)
    waiting = [read() for _ in range(10_000)]
    join(line, waiting)
    for ticket in reversed(waiting[1:]):
        line.leave(ticket, 1)
    assert list(line.leave(running, 2)) == [waiting[0]]
