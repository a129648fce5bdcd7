"""The order `phases`: its four rules as stories."""

from collections.abc import Iterable

from proxy.line import Line, Policy, Ticket
from proxy.matrix import Matrix
from proxy.residency import AtMost, Residency, Sets
from tests.proxy.lines import FIFO, holds, join, none, read, waits, write

SLICE = Policy(slice=10.0)
NO_SLICE = Policy(slice=0.0)


def rooms(expression: str) -> Residency:
    return Residency([Sets(Matrix({"all": expression}, {}, {}), [])])


QVT = rooms("(q | v | t) & e")


def opened(line: Line, ticket: Ticket, now: float) -> Ticket:
    """The ticket holds and its answer has begun."""
    line.join(ticket, now)
    assert holds(ticket)
    line.opened(ticket, now)
    return ticket


# Rule 1


def test_whoever_comes_while_a_room_opens_may_enter() -> None:
    line = Line(NO_SLICE, QVT)
    chat, vision, late = read("q"), read("v"), read("q")
    join(line, [chat, vision, late])
    assert holds(chat, late)
    assert waits(vision)
    assert late.overtakes


def test_a_room_has_opened_at_the_first_byte_of_any_answer() -> None:
    line = Line(NO_SLICE, QVT)
    first, second, vision = read("q"), read("q"), read("v")
    join(line, [first, second, vision])
    line.opened(second, 5.0)
    late = read("q")
    line.join(late, 6.0)
    assert waits(late)


def test_a_room_has_opened_when_somebody_leaves_it_without_an_answer() -> None:
    line = Line(NO_SLICE, QVT)
    failed, other, vision = read("q"), read("q"), read("v")
    join(line, [failed, other, vision])
    line.leave(failed, 1.0)
    late = read("q")
    line.join(late, 2.0)
    assert waits(late)


# Rule 2


def test_whoever_waits_when_the_room_has_opened_is_served_in_this_phase_as_capacity_allows() -> None:
    line = Line(NO_SLICE, QVT)
    running, vision = read("q", limit=1), read("v")
    batch = [read("q", limit=1), read("q", limit=1)]
    join(line, [running, vision, *batch])
    line.opened(running, 1.0)
    late = read("q", limit=1)
    line.join(late, 2.0)
    assert list(line.leave(running, 3.0)) == [batch[0]]
    assert list(line.leave(batch[0], 4.0)) == [batch[1]]
    assert list(line.leave(batch[1], 5.0)) == [vision]
    assert list(line.leave(vision, 6.0)) == [late]


def test_the_writers_of_a_phase_are_served_one_after_the_other() -> None:
    line = Line(NO_SLICE, QVT)
    first, second, third, chat = write("t"), write("t"), write("t"), read("q")
    join(line, [first, second, chat, third])
    line.opened(first, 1.0)
    late = write("t")
    line.join(late, 2.0)
    assert list(line.leave(first, 3.0)) == [second]
    assert list(line.leave(second, 4.0)) == [third]
    assert list(line.leave(third, 5.0)) == [chat]
    assert list(line.leave(chat, 6.0)) == [late]


# Rule 3


def test_newcomers_enter_freely_while_nobody_who_conflicts_waits() -> None:
    line = Line(NO_SLICE, QVT)
    opened(line, read("q"), 0.0)
    late = read("q")
    line.join(late, 1000.0)
    assert holds(late)
    assert not late.overtakes


def test_newcomers_enter_for_as_long_as_the_slice() -> None:
    line = Line(SLICE, QVT)
    opened(line, read("q"), 0.0)
    early, vision, within, after = read("q"), read("v"), read("q"), read("q")
    join(line, [early, vision], 1.0)
    line.join(within, 9.9)
    line.join(after, 10.0)
    assert holds(early, within)
    assert waits(vision, after)


def test_a_room_is_kept_as_long_as_it_took_to_open_and_no_longer_than_max_slice() -> None:
    for load, kept in ((12.0, 12.0), (100.0, 30.0)):
        line = Line(Policy(), QVT)
        chat, vision = read("q"), read("v")
        join(line, [chat, vision])
        line.opened(chat, load)
        within, after = read("q"), read("q")
        line.join(within, load + kept - 0.1)
        line.join(after, load + kept)
        assert holds(within)
        assert waits(after)


class Usually:
    def length(self, model: str) -> float:
        return {"q": 8.0}.get(model, 0.0)

    def opening(self, model: str) -> float:
        return {"v": 10.0}.get(model, 0.0)


def test_newcomers_enter_while_the_oldest_whom_they_hinder_can_still_start_within_patience() -> None:
    line = Line(Policy(slice=0.0, patience=45.0), QVT, Usually())
    opened(line, read("q"), 0.0)
    vision, other, within, after = read("v"), read("t"), read("q"), read("q")
    line.join(vision, 100.0)
    line.join(other, 110.0)
    line.join(within, 126.9)  # 26.9 + 8 + 10 < 45
    line.join(after, 127.0)
    assert holds(within)
    assert waits(after)


# Rule 4


def test_the_next_room_opens_for_the_longest_waiter() -> None:
    line = Line(NO_SLICE, QVT)
    running = opened(line, read("q"), 0.0)
    speech, vision, chat = write("t"), read("v"), read("q")
    join(line, [speech, vision, chat], 1.0)
    assert list(line.leave(running, 2.0)) == [speech]
    assert list(line.leave(speech, 3.0)) == [vision]
    assert list(line.leave(vision, 4.0)) == [chat]


def test_a_room_that_runs_empty_gives_way_though_its_slice_is_not_over() -> None:
    line = Line(SLICE, QVT)
    running = opened(line, read("q"), 0.0)
    vision = read("v")
    line.join(vision, 1.0)
    assert list(line.leave(running, 2.0)) == [vision]


def serve(line: Line, waiting: Iterable[Ticket]) -> list[str]:
    """Serves until nobody is left, the longest holder first; the models that were loaded, in order."""
    loads: list[str] = []
    holding = []
    for ticket in waiting:
        holding += line.join(ticket, 0.0)
    now = 0.0
    while holding:
        now += 1.0
        ticket = holding.pop(0)
        if ticket.swaps:
            loads.append(ticket.model)
        if ticket.opened is None:
            line.opened(ticket, now)
        holding += line.leave(ticket, now)
    return loads


def test_a_b_a_a_c_a_b_c_takes_three_loads_and_seven_in_fifo() -> None:
    abc = rooms("a | b | c")
    assert serve(Line(Policy(), abc), map(read, "abaacabc")) == ["a", "b", "c"]
    assert serve(Line(FIFO, abc), map(read, "abaacabc")) == ["a", "b", "a", "c", "a", "b", "c"]


# Rooms of one, of all, of some


def test_without_residency_all_readers_are_one_room() -> None:
    line = Line(NO_SLICE)
    opened(line, read("chat"), 0.0)
    beside = read("vision")
    line.join(beside, 1.0)
    speech, late = write("tts"), read("vision")
    join(line, [speech, late], 2.0)
    assert holds(beside)
    assert waits(speech, late)


def test_without_residency_each_write_model_is_a_room_of_its_own() -> None:
    line = Line(NO_SLICE)
    running = opened(line, write("a"), 0.0)
    other, same = write("b"), write("a")
    join(line, [other, same], 1.0)
    assert list(line.leave(running, 2.0)) == [other]


def test_it_is_phase_fair_with_neither_slice_nor_patience() -> None:
    """After each writer all readers that wait, after each phase of readers one writer's room."""
    line = Line(NO_SLICE)
    running = opened(line, write("a"), 0.0)
    readers = [read(), read(), read()]
    writers = [write("b"), write("c")]
    join(line, [readers[0], writers[0], readers[1], writers[1], readers[2]])
    assert set(line.leave(running, 1.0)) == set(readers)
    line.opened(readers[0], 1.0)
    late = read()
    line.join(late, 2.0)
    assert waits(late)
    for reader in readers[:2]:
        assert list(line.leave(reader, 3.0)) == []
    assert list(line.leave(readers[2], 3.0)) == [writers[0]]
    line.opened(writers[0], 3.0)
    assert list(line.leave(writers[0], 4.0)) == [writers[1]]


def test_one_who_goes_with_everybody_need_not_wait_for_anybody() -> None:
    line = Line(NO_SLICE, QVT)
    opened(line, read("q"), 0.0)
    vision, embedding = read("v"), read("e")
    join(line, [vision, embedding], 1.0)
    assert holds(embedding)


def test_mode_none_goes_beside_a_writer() -> None:
    line = Line(NO_SLICE, QVT)
    embedding = none("e")
    join(line, [write("t"), read("q"), embedding])
    assert holds(embedding)


def test_two_gpus_under_one_lease_take_turns_independently() -> None:
    line = Line(NO_SLICE, rooms("(a | b) & (c | d)"))
    first, third = opened(line, read("a"), 0.0), opened(line, read("c"), 0.0)
    fourth, second = read("d"), read("b")
    join(line, [fourth, second], 1.0)
    assert list(line.leave(first, 2.0)) == [second]
    line.opened(second, 3.0)
    late, again = read("c"), read("a")
    join(line, [late, again], 4.0)
    assert waits(fourth, late, again)
    assert list(line.leave(second, 5.0)) == [again]
    assert list(line.leave(third, 6.0)) == [fourth]


def test_a_room_beside_the_one_that_a_newcomer_hinders_is_no_licence() -> None:
    line = Line(SLICE, rooms("(a | b) & (c | d)"))
    opened(line, read("c"), 0.0)
    fourth = read("d")
    line.join(fourth, 20.0)
    line.join(read("a"), 21.0)  # its room opens now
    late = read("c")
    line.join(late, 22.0)
    assert waits(fourth, late)


def test_a_model_that_goes_with_a_room_enters_by_its_rules_and_stays_in_it() -> None:
    line = Line(SLICE, rooms("(q & r) | v"))
    chat = opened(line, read("q"), 0.0)
    vision, beside = read("v"), read("r")
    join(line, [vision, beside], 1.0)
    assert holds(beside)
    assert beside.room is chat.room
    line.leave(chat, 2.0)
    late = read("r")
    line.join(late, 11.0)
    assert waits(late)


def test_a_room_is_over_when_one_opens_that_it_excludes_though_somebody_is_left_in_it() -> None:
    line = Line(SLICE, rooms("(q & r) | (v & r) | t"))
    chat = opened(line, read("q"), 0.0)
    big, beside = read("t"), read("r")
    join(line, [big, beside], 1.0)
    assert beside.room is chat.room
    line.leave(big, 2.0)
    vision, late = read("v"), read("q")
    join(line, [vision], 3.0)
    assert list(line.leave(chat, 4.0)) == [vision]
    join(line, [read("t"), late], 5.0)
    assert waits(late)
    assert late not in line.leave(vision, 6.0), "the slice of the first room is no licence any more"


def test_where_two_of_three_fit_nobody_is_kept_out_by_the_two_in_turn() -> None:
    line = Line(NO_SLICE, Residency([AtMost(2, "router", lambda model: True)]))
    a, b = opened(line, read("a"), 0.0), opened(line, read("b"), 0.0)
    c, more_a, more_b = read("c"), read("a"), read("b")
    join(line, [c, more_a, more_b], 1.0)
    assert waits(c, more_a, more_b)
    assert c in line.leave(a, 2.0)
    line.opened(c, 3.0)
    assert more_a in line.leave(b, 4.0)


# What the tickets tell


def test_a_grant_that_changes_what_must_be_resident_is_a_swap() -> None:
    line = Line(NO_SLICE, QVT)
    line.resident = frozenset("q")
    chat, embedding, vision = read("q"), read("e"), read("v")
    join(line, [chat, embedding, vision])
    assert (chat.swaps, embedding.swaps) == (False, True)
    line.leave(chat, 1.0)
    assert vision.swaps
    assert line.resident == frozenset("ve")


def test_without_residency_nothing_is_known_to_swap() -> None:
    line = Line(NO_SLICE)
    chat = read("q")
    line.join(chat, 0.0)
    assert not chat.swaps


def test_one_with_nobody_older_before_it_overtakes_nobody() -> None:
    line = Line(SLICE, QVT)
    opened(line, read("q"), 0.0)
    vision, passing = read("v"), read("q")
    join(line, [vision, passing], 1.0)
    assert passing.overtakes
    assert not vision.overtakes


def test_other_rules_come_in_while_tickets_hold_and_wait() -> None:
    line = Line(FIFO, QVT)
    running, vision, late = read("q"), read("v"), read("q")
    join(line, [running, vision, late])
    assert list(line.reconfigure(NO_SLICE, QVT, 1.0)) == []
    assert list(line.leave(running, 2.0)) == [vision]
    line.opened(vision, 2.0)
    assert list(line.reconfigure(FIFO, QVT, 3.0)) == []
    assert list(line.leave(vision, 4.0)) == [late]
