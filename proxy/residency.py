"""Which models can be resident together. Pure; where the rules come from is the business of rooms.py.

Each source of rules (an upstream's own configuration, a list by hand) speaks of some models and judges those alone. A
combination is possible when every source allows the part that it speaks of, or when the lease's own matrix, which adds
to the sources or replaces them, has it in one of its sets. A model that no source speaks of excludes nobody; where the
lease has a matrix of its own, it runs alone, as llama-swap has it for a model in no set.

The rules are asked in one direction: may `model` be loaded without stopping one of `held`? For matrices that is the
same both ways. In llama-swap's groups it is not: loading a model of a group that is not `exclusive` stops nothing
outside it, but a model of an exclusive group stops that model again. Such a model may join the exclusive one; the
exclusive one waits until it has gone.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from proxy.matrix import Matrix


class Rules(Protocol):
    """What one source says about the models that it speaks of."""

    def speaks_of(self, model: str) -> bool:
        """False: whatever it says does not concern this model."""

    def admits(self, held: frozenset[str], model: str) -> bool:
        """Can `model` be loaded without stopping one of `held`? All are models that it speaks of, none is twice."""

    def models(self) -> Iterable[str]:
        """The models that it names, in its own order."""

    def words(self) -> Iterable[str]:
        """What it says that is not about pairs of models."""


@dataclass(frozen=True, slots=True)
class Group:
    """One of llama-swap's groups. `swap`: one member at a time; `exclusive`: loading one stops the other groups, except
    the `persistent` ones."""

    members: tuple[str, ...]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


class Groups:
    """llama-swap's groups; models in none of them are one more group, with swap and exclusive."""

    def __init__(self, groups: Iterable[Group], models: Iterable[str]) -> None:
        self._group = {member: group for group in groups for member in group.members}
        rest = Group(tuple(model for model in models if model not in self._group))
        self._group |= dict.fromkeys(rest.members, rest)

    def speaks_of(self, model: str) -> bool:
        return model in self._group

    def admits(self, held: frozenset[str], model: str) -> bool:
        own = self._group[model]
        for other in held:
            group = self._group[other]
            if own.swap if group is own else own.exclusive and not group.persistent:
                return False
        return True

    def models(self) -> Iterable[str]:
        return self._group

    def words(self) -> Iterable[str]:
        return ()


class Sets:
    """A matrix as llama-swap reads its own: a model in no set runs alone."""

    def __init__(self, matrix: Matrix, models: Iterable[str]) -> None:
        self.matrix = matrix
        self._models = dict.fromkeys((*models, *matrix.models))

    def speaks_of(self, model: str) -> bool:
        return model in self._models

    def admits(self, held: frozenset[str], model: str) -> bool:
        return not held or self.matrix.has(held | {model})

    def models(self) -> Iterable[str]:
        return self._models

    def words(self) -> Iterable[str]:
        return ()


class Exclusive:
    """Lists by hand: of each list one model at a time."""

    def __init__(self, lists: Iterable[Iterable[str]]) -> None:
        self._lists = [frozenset(models) for models in lists]
        self._models = dict.fromkeys(sorted(frozenset[str]().union(*self._lists)))

    def speaks_of(self, model: str) -> bool:
        return model in self._models

    def admits(self, held: frozenset[str], model: str) -> bool:
        return not any(model in models and held & models for models in self._lists)

    def models(self) -> Iterable[str]:
        return self._models

    def words(self) -> Iterable[str]:
        return ()


class AtMost:
    """A server that keeps `count` models, whichever they are. `mine` says which models are this server's."""

    def __init__(self, count: int, server: str, mine: Callable[[str], bool], named: Iterable[str] = ()) -> None:
        self._count = count
        self._server = server
        self._mine = mine
        self._named = tuple(named)

    def speaks_of(self, model: str) -> bool:
        return self._mine(model)

    def admits(self, held: frozenset[str], model: str) -> bool:
        return len(held) < self._count

    def models(self) -> Iterable[str]:
        return self._named

    def words(self) -> Iterable[str]:
        if self._count > 1:
            yield f"{self._server} keeps {self._count} models at a time"


class Residency:
    """The rules of one lease, from all sources. What it is asked is memoised: rooms ask the same again and again.

    `matrix`: the lease's own, which adds to the sources or, with `replaces`, is all that counts for their models.
    `names`: other names of models, and what they stand for: one model for an alias, several for a name whose target is
    chosen per request (whatever is chosen must be admitted), none for a model that is on another machine. `always`:
    models that fit beside everything. `limits`: requests for a model that its swapper takes at a time.
    """

    def __init__(
        self,
        sources: Sequence[Rules] = (),
        *,
        matrix: Matrix | None = None,
        replaces: bool = False,
        names: Mapping[str, frozenset[str]] | None = None,
        always: Iterable[str] = (),
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._matrix = matrix
        self._replaces = replaces
        self._names = dict(names or {})
        self.limits = dict(limits or {})
        self._always = frozenset((*always, "", "*"))
        self._admits = lru_cache(8192)(self._decide)
        self._hinders = lru_cache(8192)(self._look_for_hindrance)
        self._after = lru_cache(8192)(self._load)
        self._words: tuple[str, ...] | None = None

    # What a Line asks

    def id(self, model: str) -> str:
        """The model that an alias stands for; any other name as it is."""
        stands_for = self._names.get(model)
        return next(iter(stands_for)) if stands_for is not None and len(stands_for) == 1 else model

    def elsewhere(self, model: str) -> bool:
        """Whether a model is known to run on another machine."""
        return self._names.get(model) == frozenset()

    def admits(self, held: frozenset[str], model: str) -> bool:
        """Can `model` be loaded, or stay, without stopping one of `held`?"""
        return self._admits(held, model)

    def hinders(self, held: frozenset[str], waiter: str, newcomer: str) -> bool:
        """Is there a part of `held` beside which `waiter` is admitted, but not when `newcomer` is there as well?"""
        return self._hinders(held, waiter, newcomer)

    def after(self, resident: frozenset[str], held: frozenset[str], model: str) -> frozenset[str]:
        """What is resident once `model` is loaded: as much stays as can, the dearest first; all of `held` stays."""
        return self._after(resident, held, model)

    def words(self) -> tuple[str, ...]:
        """The rules for people: one line for each model that excludes others, then what is not about pairs."""
        if self._words is None:
            self._words = (*self._pairs(), *(line for rules in self._sources for line in rules.words()))
        return self._words

    # What others ask

    def excludes(self, one: str, other: str) -> bool:
        """Does loading one of the two stop the other?"""
        return not self.admits(frozenset({one}), other) or not self.admits(frozenset({other}), one)

    def models(self) -> tuple[str, ...]:
        """Every model that the rules name, in their order."""
        named = dict.fromkeys(model for rules in self._sources for model in rules.models())
        if self._matrix is not None:
            named |= dict.fromkeys(self._matrix.models)
        return tuple(model for model in named if model not in self._always)

    # Decisions

    def _concerns(self, model: str) -> bool:
        if model in self._always:
            return False
        return self._matrix is not None or any(rules.speaks_of(model) for rules in self._sources)

    def _stands_for(self, name: str) -> frozenset[str]:
        models = self._names.get(name)
        return frozenset(filter(self._concerns, (name,) if models is None else models))

    def _decide(self, held: frozenset[str], model: str) -> bool:
        targets = self._stands_for(model)
        choices = [models for name in held if (models := self._stands_for(name))]
        return all(
            self._fits(frozenset(there) - {target}, target)
            for there in itertools.product(*choices)
            for target in targets
        )

    def _fits(self, held: frozenset[str], model: str) -> bool:
        if not held:
            return True
        if self._matrix is not None:
            together = held | {model}
            if self._matrix.has(together):
                return True
            if self._replaces or not all(any(rules.speaks_of(m) for rules in self._sources) for m in together):
                return False
        return all(
            rules.admits(frozenset(filter(rules.speaks_of, held)), model)
            for rules in self._sources
            if rules.speaks_of(model)
        )

    def _load(self, resident: frozenset[str], held: frozenset[str], model: str) -> frozenset[str]:
        model = self.id(model)
        if model in self._names or not self._concerns(model):
            return resident
        for gone in self._evictions(resident - {model}, {self.id(name) for name in held}, model):
            return resident - gone | {model}
        return resident | {model}

    def _look_for_hindrance(self, held: frozenset[str], waiter: str, newcomer: str) -> bool:
        """Holders are taken away, one out of each set that keeps the waiter out, until only the newcomer does or
        nobody does. A rule about pairs has one way to do that; a rule about n models has at most n."""
        if waiter == newcomer:
            return False
        seen: set[frozenset[str]] = set()
        parts = [held - {newcomer}]
        while parts:
            part = parts.pop()
            if part in seen or self.admits(part | {newcomer}, waiter):
                continue
            if self.admits(part, waiter):
                return True
            seen.add(part)
            parts.extend(part - {model} for model in self._blockers(part, waiter))
        return False

    def _blockers(self, held: frozenset[str], model: str) -> list[str]:
        """A smallest part of `held` that keeps `model` out."""
        blocking = held
        for other in sorted(held):
            if not self.admits(blocking - {other}, model):
                blocking -= {other}
        return sorted(blocking)

    def _evictions(self, resident: frozenset[str], held: set[str], model: str) -> Iterator[frozenset[str]]:
        """The parts of `resident` without which `model` fits, the cheapest first."""
        order = itertools.count()
        heap: list[tuple[int, int, frozenset[str]]] = [(0, next(order), frozenset())]
        seen: set[frozenset[str]] = set()
        while heap:
            cost, _, gone = heapq.heappop(heap)
            if gone in seen:
                continue
            seen.add(gone)
            if self.admits(resident - gone, model):
                yield gone
                continue
            for other in self._blockers(resident - gone, model):
                if other not in held:
                    heapq.heappush(heap, (cost + self._cost(other), next(order), gone | {other}))

    def _cost(self, model: str) -> int:
        matrices = [rules.matrix for rules in self._sources if isinstance(rules, Sets)]
        if self._matrix is not None:
            matrices.insert(0, self._matrix)
        return next((matrix.costs[model] for matrix in matrices if model in matrix.costs), 1)

    # Words

    def _pairs(self) -> Iterator[str]:
        models = self.models()
        for model in models:
            out = [other for other in models if other != model and self.excludes(model, other)]
            stay = [other for other in models if other != model and other not in out]
            if out:
                yield (
                    f"{model} excludes "
                    + (_list(out) if stay else "all others" if len(out) > 1 else out[0])
                    + (f"; {_list(stay)} {'stays' if len(stay) == 1 else 'stay'}" if stay else "")
                )


def _list(names: Sequence[str], most: int = 8) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
