"""Moving averages of what requests and loads take."""

import pytest

from proxy.line import Mode, Room, Ticket
from proxy.usual import Averages, Usual


def ticket(
    arrived: float,
    granted: float | None,
    opened: float | None,
    released: float,
    *,
    room: float | None = None,
    swaps: bool = False,
) -> Ticket:
    """`room`: when its room had opened."""
    one = Ticket("t", "q", "g", Mode.READ)
    one.arrived, one.granted, one.opened, one.released, one.swaps = arrived, granted, opened, released, swaps
    if room is not None:
        one.room = Room(Mode.READ, {"q"}, 0.0, opened=room)
    return one


def test_the_first_value_is_the_average_and_each_other_counts_for_a_fifth() -> None:
    averages = Averages()
    averages.add("q", 10.0)
    averages.add("q", 20.0)
    assert averages.get("q") == 12.0
    assert averages.get("v") is None


def test_keys_that_were_not_used_for_long_are_forgotten() -> None:
    averages = Averages(keys=2)
    for key in ("a", "b", "a", "c"):
        averages.add(key, 1.0)
    assert [averages.get(key) for key in "abc"] == [1.0, None, 1.0]


def test_nothing_takes_no_time_while_nothing_is_known() -> None:
    usual = Usual()
    assert (usual.length("q"), usual.opening("q"), usual.wait()) == (0.0, 0.0, 0.0)


def test_the_length_of_a_request_is_that_of_one_whose_model_was_resident() -> None:
    usual = Usual()
    usual.learn(ticket(0.0, 0.0, 12.0, 20.0, swaps=True))
    assert usual.length("q") == 8.0, "without the load, while nothing better is known"
    usual.learn(ticket(30.0, 30.0, 31.0, 36.0, room=12.0))
    assert usual.length("q") == pytest.approx(8.0 + 0.2 * (6.0 - 8.0))
    usual.learn(ticket(40.0, 40.0, 52.0, 53.0, swaps=True))
    usual.learn(ticket(41.0, 41.0, 53.0, 54.0, room=52.0))
    assert usual.length("q") == pytest.approx(7.6), "those who waited for the load say no more"


def test_the_time_to_open_is_that_of_a_grant_that_swaps() -> None:
    usual = Usual()
    usual.learn(ticket(0.0, 1.0, 13.0, 20.0, swaps=True))
    usual.learn(ticket(2.0, 2.0, 13.0, 20.0, room=13.0))
    assert usual.opening("q") == 12.0


def test_the_usual_wait_is_that_of_those_who_had_to_wait() -> None:
    usual = Usual()
    usual.learn(ticket(0.0, 0.0, 1.0, 2.0))
    usual.learn(ticket(0.0, 5.0, 6.0, 7.0))
    assert usual.wait() == 5.0


def test_a_ticket_without_a_grant_or_an_answer_says_nothing_about_lengths() -> None:
    usual = Usual()
    usual.learn(ticket(0.0, None, None, 9.0))
    usual.learn(ticket(0.0, 1.0, None, 9.0))
    assert usual.length("q") == 0.0


def test_many_tickets_are_learned_without_being_asked_about() -> None:
    usual = Usual()
    for _ in range(1000):
        usual.learn(ticket(0.0, 0.0, 1.0, 4.0, room=0.0))
    assert usual.length("q") == pytest.approx(4.0)
