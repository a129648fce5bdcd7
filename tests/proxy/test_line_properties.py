"""What holds for every ticket under any arrivals, cancellations, failures and releases."""

from dataclasses import dataclass
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.line import Line, Mode, Policy, Ticket
from proxy.matrix import Matrix
from proxy.residency import Residency, Sets
from tests.fakes.residency import all_sets
from tests.proxy.obvious import ObviousLine

Action = Literal["join", "leave", "give up", "open"]

MODELS = {  # what can be asked for: (mode, model)
    "read": [(Mode.READ, "a"), (Mode.READ, "b"), (Mode.READ, "c"), (Mode.READ, "d")],
    "write": [(Mode.WRITE, "c"), (Mode.WRITE, "t"), (Mode.WRITE, "u")],
    "none": [(Mode.NONE, "e"), (Mode.NONE, "a")],
}
KINDS = [kind for kinds in MODELS.values() for kind in kinds]
EXPRESSIONS = [
    None,
    "a | b | c | d | t | u",
    "(a | b | c | t) & (d | u)",
    "(a | b) & (c | d)",
    "a & b | b & c | c & a | d & t",
    "(a & b) | (b & c & d)",
    "a & b & c | c & d | t & u",
]
POLICIES = [
    Policy(order="fifo"),
    Policy(slice=0.0),
    Policy(slice=3.0),
    Policy(slice="auto", max_slice=4.0),
]
PHASES = POLICIES[1:]


@dataclass(frozen=True)
class Story:
    """A random life of a line: its rules, and (action, which, seconds before it)."""

    policy: Policy
    expression: str | None
    limits: dict[str, int]
    steps: list[tuple[Action, int, float]]


ACTIONS: list[Action] = ["join", "join", "join", "leave", "leave", "give up", "open"]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0, 2.5])), max_size=60
)


def stories(policies: list[Policy] = POLICIES) -> st.SearchStrategy[Story]:
    limits = st.dictionaries(st.sampled_from("abt"), st.integers(1, 2), max_size=2)
    return st.builds(Story, st.sampled_from(policies), st.sampled_from(EXPRESSIONS), limits, STEPS)


def sets_of(expression: str | None) -> list[frozenset[str]] | None:
    return None if expression is None else all_sets({"sets": {"all": expression}})


class World:
    """The line, and the same tickets in the obvious line, side by side."""

    def __init__(self, story: Story) -> None:
        rules = None
        if story.expression is not None:
            rules = Residency([Sets(Matrix({"all": story.expression}, {}, {}), "abcdetu")])
        self.story = story
        self.line = Line(story.policy, rules)
        self.obvious = ObviousLine(story.policy, sets_of(story.expression))
        self.now = 0.0
        self.tickets: list[Ticket] = []

    def tell(self) -> None:
        for action, which, seconds in self.story.steps:
            self.now += seconds
            self.act(action, which)

    def act(self, action: Action, which: int) -> None:
        if action == "join":
            mode, model = KINDS[which % len(KINDS)]
            ticket = Ticket(f"{len(self.tickets)}", model, "g", mode, self.story.limits.get(model))
            self.tickets.append(ticket)
            self.check(self.line.join(ticket, self.now), self.obvious.join(ticket, self.now))
            return
        among = self.obvious.waiting if action == "give up" else self.obvious.holding
        if not among:
            return
        ticket = among[which % len(among)]
        if action == "open":
            if ticket.opened is None:
                self.line.opened(ticket, self.now)
                self.obvious.opened(ticket, self.now)
            return
        self.check(self.line.leave(ticket, self.now), self.obvious.leave(ticket, self.now))

    def check(self, granted: object, expected: set[Ticket]) -> None:
        assert set(granted) == expected  # type: ignore[call-overload]

    def finish(self) -> None:
        """Everyone who holds leaves, until nobody is left."""
        while self.obvious.holding:
            self.now += 1.0
            self.act("leave", 0)


class Watched(World):
    """After each event, what must always be true is looked at."""

    def act(self, action: Action, which: int) -> None:
        super().act(action, which)
        look = self.obvious
        others = [ticket for ticket in look.holding if ticket.mode is not Mode.NONE]
        assert look.together(look.held())
        assert len(others) < 2 or all(ticket.mode is Mode.READ for ticket in others)
        for ticket in look.waiting:
            others = [other for other in (*look.holding, *look.waiting) if other is not ticket]
            if look.fits(ticket) and look.has_capacity(ticket):
                assert any(look.hinders(ticket, other) or look.hinders(other, ticket) for other in others)


@settings(max_examples=400, deadline=None)
@given(stories())
def test_the_line_grants_what_the_obvious_line_grants(story: Story) -> None:
    World(story).tell()


@settings(max_examples=200, deadline=None)
@given(stories())
def test_no_two_hold_that_do_not_fit_and_nobody_waits_who_conflicts_with_no_one(story: Story) -> None:
    Watched(story).tell()


@settings(max_examples=200, deadline=None)
@given(stories())
def test_everyone_is_served_in_the_end_and_the_counts_return_to_zero(story: Story) -> None:
    world = World(story)
    world.tell()
    world.finish()
    assert all(ticket.released is not None for ticket in world.tickets)
    assert repr(world.line) == "<Line 0 read, 0 write, 0 waiting>"
    assert not list(world.line.waiting())
    assert not world.line.rooms
    last = Ticket("last", "t", "g", Mode.WRITE, 1)
    assert list(world.line.join(last, world.now)) == [last]


@settings(max_examples=200, deadline=None)
@given(stories([Policy(order="fifo")]))
def test_fifo_never_overtakes(story: Story) -> None:
    world = World(story)
    granted_before: set[Ticket] = set()
    for action, which, seconds in story.steps:
        world.now += seconds
        waiting = list(world.obvious.waiting)
        world.act(action, which)
        for ticket in world.obvious.holding:
            if ticket in granted_before:
                continue
            granted_before.add(ticket)
            assert not ticket.overtakes
            older = waiting[: waiting.index(ticket)] if ticket in waiting else waiting
            still = [other for other in older if other in world.obvious.waiting]
            assert not any(world.obvious.hinders(ticket, other) for other in still)


@settings(max_examples=200, deadline=None)
@given(stories(PHASES))
def test_whoever_passes_does_so_while_its_room_opens_or_in_its_batch_or_slice(story: Story) -> None:
    world = World(story)
    world.tell()
    world.finish()
    for ticket in world.tickets:
        if not ticket.overtakes:
            continue
        room = ticket.room
        assert room is not None
        assert ticket.granted is not None
        kept = world.obvious.policy.slice
        assert room.opened is not None
        length = min(room.opened - room.since, 4.0) if kept == "auto" else kept
        assert ticket.granted <= room.opened or ticket.number <= room.batch or ticket.granted - room.opened < length


@settings(max_examples=200, deadline=None)
@given(stories(PHASES))
def test_while_a_ticket_waits_each_kind_of_others_opens_at_most_one_room_that_keeps_it_out(story: Story) -> None:
    """And only for a ticket that is older. With `limit`, a room can end before all whom it owed were served."""
    story = Story(story.policy, story.expression, {}, story.steps)
    world = World(story)
    world.tell()
    world.finish()
    openers = [t for t in world.tickets if t.room is not None and t.granted == t.room.since]
    for waiter in world.tickets:
        if waiter.mode is Mode.NONE or waiter.granted is None or waiter.arrived is None:
            continue
        seen: dict[tuple[Mode, str], object] = {}
        for opener in openers:
            assert opener.granted is not None
            apart = Mode.WRITE in (opener.mode, waiter.mode) or not world.obvious.together((opener.model, waiter.model))
            if opener is waiter or not apart or not waiter.arrived < opener.granted < waiter.granted:
                continue
            if (opener.mode, opener.model) != (waiter.mode, waiter.model):
                assert opener.number < waiter.number or opener.overtakes
                kind = (opener.mode, opener.model)
                assert seen.setdefault(kind, opener.room) is opener.room, "a second room of the same kind"


SHARED = [kind for kind in KINDS if kind[0] is not Mode.NONE]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(SHARED), min_size=1, max_size=4),
    st.sampled_from(SHARED),
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(PHASES),
    st.integers(1, 3),
)
def test_under_an_endless_load_of_any_mix_nobody_waits_for_ever(
    load: list[tuple[Mode, str]], victim: tuple[Mode, str], expression: str | None, policy: Policy, work: int
) -> None:
    """Of each kind of the load a reader comes every second, a writer every 13. Each holds for `work` seconds.

    One who comes waits for at most five phases (four of the load, and the one that runs). Each takes its slice (4 s at
    most), its last holders, and the writers who waited when it opened; those are three of a kind by then at most.
    """
    world = World(Story(policy, expression, {}, []))
    ends: dict[Ticket, float] = {}
    ticket = None
    for second in range(200):
        world.now = float(second)
        for one, end in list(ends.items()):
            if end <= second:
                del ends[one]
                world.act("leave", world.obvious.holding.index(one))
        if second == 40:
            world.act("join", KINDS.index(victim))
            ticket = world.tickets[-1]
        for kind in load:
            if kind[0] is Mode.READ or second % 13 == 0:
                world.act("join", KINDS.index(kind))
        for one in world.obvious.holding:
            if one not in ends:
                ends[one] = second + work
                world.act("open", world.obvious.holding.index(one))
        if ticket is not None and ticket.granted is not None:
            break
    assert ticket is not None
    assert ticket.granted is not None
    assert ticket.granted - 40 <= 5 * (4 + work + 3 * work)
