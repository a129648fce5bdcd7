"""The rules of the line written the slow and obvious way: every waiting ticket is looked at, every subset is tried.

It shares nothing with proxy/line.py but the tickets and the words. Models are resident together when `sets` has one that
contains them all; without sets all readers go together and each write model is on its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, combinations

from proxy.line import Mode, Policy, Ticket


def parts(models: Iterable[str]) -> Iterable[frozenset[str]]:
    models = sorted(models)
    return map(frozenset, chain.from_iterable(combinations(models, size) for size in range(len(models) + 1)))


@dataclass(eq=False)
class Phase:
    mode: Mode
    models: set[str]
    since: float
    opened: float | None = None
    batch: set[Ticket] = field(default_factory=set)
    inside: set[Ticket] = field(default_factory=set)


class ObviousLine:
    def __init__(self, policy: Policy, sets: list[frozenset[str]] | None) -> None:
        self.policy = policy
        self.sets = sets
        self.waiting: list[Ticket] = []
        self.holding: list[Ticket] = []
        self.phases: list[Phase] = []
        self.phase_of: dict[Ticket, Phase] = {}

    # The words

    def together(self, models: Iterable[str]) -> bool:
        models = frozenset(models)
        return self.sets is None or len(models) < 2 or any(models <= allowed for allowed in self.sets)

    def held(self) -> frozenset[str]:
        return frozenset(ticket.model for ticket in self.holding if ticket.mode is not Mode.NONE)

    def fits(self, ticket: Ticket) -> bool:
        others = [other for other in self.holding if other.mode is not Mode.NONE]
        if ticket.mode is Mode.NONE or not others:
            return True
        if Mode.WRITE in (ticket.mode, *(other.mode for other in others)):
            return False
        return self.together({ticket.model} | self.held())

    def has_capacity(self, ticket: Ticket) -> bool:
        return ticket.limit is None or sum(other.model == ticket.model for other in self.holding) < ticket.limit

    def keeps_out(self, model: str, waiter: str) -> bool:
        return model != waiter and any(
            self.together({waiter} | part) and not self.together({waiter, model} | part) for part in parts(self.held())
        )

    def hinders(self, ticket: Ticket, waiter: Ticket) -> bool:
        if Mode.NONE in (ticket.mode, waiter.mode):
            return False
        return Mode.WRITE in (ticket.mode, waiter.mode) or self.keeps_out(ticket.model, waiter.model)

    def passed_by(self, ticket: Ticket) -> list[Ticket]:
        """The older ones whom it would hinder."""
        return [older for older in self.waiting[: self.waiting.index(ticket)] if self.hinders(ticket, older)]

    # Rooms

    def home(self, ticket: Ticket) -> Phase | None:
        for phase in self.phases:
            if phase.mode is ticket.mode and (
                ticket.model in phase.models or (self.sets is None and ticket.mode is Mode.READ)
            ):
                return phase
        return None

    def may_pass(self, ticket: Ticket, now: float) -> Phase | None:
        home = self.home(ticket)
        for phase in self.phases if home is None else [home]:
            if phase.mode is not ticket.mode:
                continue
            if phase is not home and (self.sets is None or not self.together(phase.models | {ticket.model})):
                continue
            if phase.opened is None or ticket in phase.batch or now < phase.opened + self.slice_of(phase):
                return phase
        return None

    def slice_of(self, phase: Phase) -> float:
        if self.policy.slice != "auto":
            return self.policy.slice
        assert phase.opened is not None
        return min(phase.opened - phase.since, self.policy.max_slice)

    # What happens

    def join(self, ticket: Ticket, now: float) -> set[Ticket]:
        self.waiting.append(ticket)
        return self.admit(now)

    def leave(self, ticket: Ticket, now: float) -> set[Ticket]:
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            return self.admit(now)
        self.holding.remove(ticket)
        phase = self.phase_of.pop(ticket, None)
        if phase is not None:
            phase.inside.remove(ticket)
            self.end_opening(phase, now)
        return self.admit(now)

    def opened(self, ticket: Ticket, now: float) -> None:
        if ticket in self.phase_of:
            self.end_opening(self.phase_of[ticket], now)

    def end_opening(self, phase: Phase, now: float) -> None:
        if phase.opened is None:
            phase.opened = now
            phase.batch = set(self.waiting)

    def admit(self, now: float) -> set[Ticket]:
        granted: set[Ticket] = set()
        while True:
            while (found := self.find(now)) is not None:
                ticket, phase = found
                self.waiting.remove(ticket)
                self.enter(ticket, phase, now)
                self.holding.append(ticket)
                granted.add(ticket)
            if all(phase.inside for phase in self.phases):
                return granted
            self.phases = [phase for phase in self.phases if phase.inside]

    def find(self, now: float) -> tuple[Ticket, Phase | None] | None:
        first_of = {}
        for ticket in self.waiting:
            first_of.setdefault((ticket.mode, ticket.model), ticket)
        able = [
            ticket
            for ticket in self.waiting
            if first_of[ticket.mode, ticket.model] is ticket and self.fits(ticket) and self.has_capacity(ticket)
        ]
        for ticket in able:
            if self.passed_by(ticket) and (phase := self.may_pass(ticket, now)):
                return ticket, phase
        for ticket in able:
            if not self.passed_by(ticket):
                return ticket, self.home(ticket)
        return None

    def enter(self, ticket: Ticket, phase: Phase | None, now: float) -> None:
        if ticket.mode is Mode.NONE or self.policy.order == "fifo":
            return
        if phase is None:
            self.phases = [
                other
                for other in self.phases
                if Mode.WRITE not in (other.mode, ticket.mode) and self.together(other.models | {ticket.model})
            ]
            phase = Phase(ticket.mode, set(), now)
            self.phases.append(phase)
        phase.models.add(ticket.model)
        phase.inside.add(ticket)
        self.phase_of[ticket] = phase
