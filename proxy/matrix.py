"""llama-swap's matrix: which models may be resident together, as sets of expressions. Pure.

    expr = and ('|' and)*      and = atom ('&' atom)*      atom = name | '+' set | '(' expr ')'

`|` offers alternatives, `&` unites one choice of each side, `+set` stands for another named set. Every part of a
combination is a combination, too. The combinations are never multiplied out: ten groups of ten alternatives are ten
billion. Whether some models are part of one is decided by walking the expression as a tree. Where no model stands on
both sides of an `&`, each goes to the side that it stands on, and the walk costs no more than the tree; a model that
stands on several sides is tried on each of them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from proxy.errors import ConfigError

_TOKEN = re.compile(r"\s*(?:([&|()])|(\+?[A-Za-z0-9_.\-]+)|(\S))")
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """Part of an expression. Compared by identity: what is written twice is one node."""

    names: frozenset[str]
    """Every model in it."""
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class _Model(_Node):
    pass


@dataclass(frozen=True, slots=True, eq=False)
class _Either(_Node):
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _All(_Node):
    parts: tuple[_Node, ...]


class Matrix:
    """Combinations of models. `models`: all that it names, in their order; `costs`: of stopping one, where it is not 1."""

    def __init__(self, sets: Mapping[str, str], variables: Mapping[str, str], costs: Mapping[str, int]) -> None:
        """Raises ConfigError: bad syntax, an unknown set, sets that contain themselves."""
        self._parser = _Parser(sets, variables)
        self._sets = tuple(self._parser.named(name) for name in sets)
        self.models = tuple(dict.fromkeys(self._parser.seen))
        self.costs = {variables.get(name, name): cost for name, cost in costs.items()}
        self._part_of = lru_cache(8192)(self._decide)

    @classmethod
    def read(cls, data: Any, where: str = "matrix") -> "Matrix":
        """From the mapping in a file: vars, sets, evict_costs. Raises ConfigError, which begins with `where`."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: must be a mapping with 'vars' and 'sets'")
        variables = _mapping(data, "vars", str, "the id of a model", where)
        sets = _mapping(data, "sets", str, "an expression", where)
        costs = _mapping(data, "evict_costs", int, "a whole number", where)
        if bad := next((name for name, cost in costs.items() if cost < 1), None):
            raise ConfigError(f"{where}: evict_costs.{bad}: must be at least 1")
        try:
            return cls(sets, variables, costs)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None

    def has(self, models: frozenset[str]) -> bool:
        """Is there a combination that contains all of them?"""
        return any(self._part_of(node, models) for node in self._sets)

    def _decide(self, node: _Node, models: frozenset[str]) -> bool:
        if not models <= node.names:
            return False
        if isinstance(node, _Either):
            return any(self._part_of(part, models) for part in node.parts)
        if isinstance(node, _All):
            return self._divide(node.parts, models)
        return True

    def _divide(self, parts: tuple[_Node, ...], models: frozenset[str]) -> bool:
        """Can the models be divided among the sides of an `&`?"""
        shares: list[frozenset[str]] = [frozenset()] * len(parts)
        several: list[tuple[str, list[int]]] = []
        for model in sorted(models):
            sides = [side for side, part in enumerate(parts) if model in part.names]
            if len(sides) == 1:
                shares[sides[0]] |= {model}
            else:
                several.append((model, sides))
        if not all(map(self._part_of, parts, shares)):
            return False

        def place(index: int) -> bool:
            if index == len(several):
                return True
            model, sides = several[index]
            tried: set[tuple[_Node, frozenset[str]]] = set()
            for side in sides:
                share = shares[side]
                # Equal sides are as good as each other: "any three of these" has the same side three times.
                if (parts[side], share) in tried:
                    continue
                tried.add((parts[side], share))
                if self._part_of(parts[side], share | {model}):
                    shares[side] = share | {model}
                    if place(index + 1):
                        return True
                    shares[side] = share
            return False

        return place(0)


class _Parser:
    def __init__(self, sets: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._texts = sets
        self._variables = variables
        self._nodes: dict[str, _Node] = {}
        self._made: dict[tuple[object, ...], _Node] = {}
        self._open: list[str] = []
        self.seen: list[str] = []

    def named(self, name: str) -> _Node:
        """The expression of a named set."""
        if name in self._nodes:
            return self._nodes[name]
        if name in self._open:
            cycle = " -> ".join((*self._open[self._open.index(name) :], name))
            raise ConfigError(f"sets.{name}: contains itself: {cycle}")
        self._open.append(name)
        tokens = list(self._tokens(name))
        node = self._either(tokens, name, len(self._open))
        if tokens:
            raise ConfigError(f"sets.{name}: '{tokens[0]}' is not expected here")
        self._open.pop()
        self._nodes[name] = node
        return node

    def _tokens(self, name: str) -> Iterator[str]:
        text = self._texts[name]
        for match in _TOKEN.finditer(text):
            if match[3]:
                raise ConfigError(f"sets.{name}: '{match[3]}' is not part of an expression")
            yield match[1] or match[2]

    def _either(self, tokens: list[str], name: str, depth: int) -> _Node:
        parts = [self._all(tokens, name, depth)]
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            parts.append(self._all(tokens, name, depth))
        return parts[0] if len(parts) == 1 else self._make(_Either, parts, name)

    def _all(self, tokens: list[str], name: str, depth: int) -> _Node:
        parts = [self._atom(tokens, name, depth)]
        while tokens and tokens[0] == "&":
            tokens.pop(0)
            parts.append(self._atom(tokens, name, depth))
        return parts[0] if len(parts) == 1 else self._make(_All, parts, name)

    def _atom(self, tokens: list[str], name: str, depth: int) -> _Node:
        if not tokens:
            raise ConfigError(f"sets.{name}: ends where a model is expected")
        self._check(depth, name)
        token = tokens.pop(0)
        if token == "(":
            node = self._either(tokens, name, depth + 1)
            if not tokens or tokens.pop(0) != ")":
                raise ConfigError(f"sets.{name}: a parenthesis is not closed")
            return node
        if token in "&|)":
            raise ConfigError(f"sets.{name}: '{token}' stands where a model is expected")
        if token.startswith("+"):
            if token[1:] not in self._texts:
                raise ConfigError(f"sets.{name}: there is no set '{token[1:]}'")
            return self.named(token[1:])
        model = self._variables.get(token, token)
        self.seen.append(model)
        return self._made.setdefault((model,), _Model(frozenset({model}), 1))

    def _make(self, kind: type[_Either] | type[_All], parts: list[_Node], name: str) -> _Node:
        depth = 1 + max(part.depth for part in parts)
        self._check(depth, name)
        names = frozenset[str]().union(*(part.names for part in parts))
        return self._made.setdefault((kind, *parts), kind(names, depth, tuple(parts)))

    def _check(self, depth: int, name: str) -> None:
        # Parsing and asking go down the tree by recursion.
        if depth > _MAX_DEPTH:
            raise ConfigError(f"sets.{name}: more than {_MAX_DEPTH} expressions inside each other")


def _mapping(data: Mapping[Any, Any], key: str, kind: type, what: str, where: str) -> dict[str, Any]:
    values = data.get(key)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {key}: must be a mapping")
    for name, value in values.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key}.{name}: must be {what}")
    return {str(name): value for name, value in values.items()}
