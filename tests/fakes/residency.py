"""Which models llama-swap keeps side by side, written the obvious way: every set is multiplied out.

This is the check on proxy/residency.py, so it shares nothing with it and is slow on purpose. Input is a
mapping of llama-swap's own configuration file, already parsed and with no macros in it.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Evicted = Callable[[str, Iterable[str]], set[str]]
"""(model to load, models that run or are being loaded) -> those that must stop first."""

_TOKEN = re.compile(r"\s*([A-Za-z0-9_.-]+|[&|()+])")


def evictions(config: Mapping[str, Any]) -> Evicted:
    """The rule of this configuration; without groups and matrix every model excludes every other."""
    router = config.get("routing", {}).get("router", {})
    settings = router.get("settings", {})
    groups = config.get("groups") or (settings.get("groups") if router.get("use") == "group" else None)
    matrix = config.get("matrix") or (settings.get("matrix") if router.get("use") == "matrix" else None)
    if groups and matrix:
        raise ValueError("groups and matrix in one file")
    if matrix:
        return _by_matrix(matrix)
    return _by_groups(groups or {})


def _by_groups(groups: Mapping[str, Mapping[str, Any]]) -> Evicted:
    home = {model: name for name, group in groups.items() for model in group["members"]}
    outside: Mapping[str, Any] = {}  # models named by no group: swap and exclusive, the defaults

    def evicted(model: str, running: Iterable[str]) -> set[str]:
        own = home.get(model)
        mine = groups[own] if own is not None else outside
        stop = set()
        for other in set(running) - {model}:
            theirs = home.get(other)
            if theirs == own:
                if mine.get("swap", True):
                    stop.add(other)
            elif mine.get("exclusive", True) and not (theirs is not None and groups[theirs].get("persistent", False)):
                stop.add(other)
        return stop

    return evicted


def _by_matrix(matrix: Mapping[str, Any]) -> Evicted:
    sets = all_sets(matrix)
    names = matrix.get("vars", {})
    costs = {names.get(name, name): cost for name, cost in (matrix.get("evict_costs") or {}).items()}

    def evicted(model: str, running: Iterable[str]) -> set[str]:
        others = set(running) - {model}
        losses = [others - chosen for chosen in sets if model in chosen]
        # min() keeps the first of equals: ties go to the order of definition
        return min(losses, key=lambda lost: sum(costs.get(m, 1) for m in lost)) if losses else others

    return evicted


def all_sets(matrix: Mapping[str, Any]) -> list[frozenset[str]]:
    """Every maximal choice of the named sets, in the order of definition. Raises ValueError on bad ones."""
    names: Mapping[str, str] = matrix.get("vars", {})
    sources: Mapping[str, str] = matrix["sets"]

    def of_set(name: str, above: tuple[str, ...]) -> list[frozenset[str]]:
        if name in above:
            raise ValueError(f"set {name} contains itself")
        if name not in sources:
            raise ValueError(f"no set {name}")
        tokens = _tokens(sources[name])
        found = either(tokens, (*above, name))
        if tokens:
            raise ValueError(f"set {name}: unexpected {tokens[0]}")
        return found

    def either(tokens: list[str], above: tuple[str, ...]) -> list[frozenset[str]]:
        found = together(tokens, above)
        while tokens[:1] == ["|"]:
            tokens.pop(0)
            found = found + together(tokens, above)
        return found

    def together(tokens: list[str], above: tuple[str, ...]) -> list[frozenset[str]]:
        found = atom(tokens, above)
        while tokens[:1] == ["&"]:
            tokens.pop(0)
            found = [a | b for a, b in itertools.product(found, atom(tokens, above))]
        return found

    def atom(tokens: list[str], above: tuple[str, ...]) -> list[frozenset[str]]:
        match tokens.pop(0) if tokens else "the end":
            case "(":
                found = either(tokens, above)
                if tokens[:1] != [")"]:
                    raise ValueError("a bracket is not closed")
                tokens.pop(0)
                return found
            case "+":
                return of_set(tokens.pop(0) if tokens else "", above)
            case "&" | "|" | ")" | "the end" as wrong:
                raise ValueError(f"unexpected {wrong}")
            case name:
                return [frozenset({names.get(name, name)})]

    return [chosen for name in sources for chosen in of_set(name, ())]


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"cannot read {text[at:]!r}")
        found.append(match[1])
        at = match.end()
    return found
