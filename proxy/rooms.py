"""From files to residency: llama-swap's own YAML, and what this program's configuration adds by hand.

Of llama-swap's file only what says which models can be resident together is read: models with their other names, groups
or matrix, selectors, profiles and peers. It is not our file: unknown keys are its own business, macros stay as they are
(but for MODEL_ID, which names of models are made of).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxy.classify import Classifier, is_pattern
from proxy.config import Config
from proxy.errors import ConfigError
from proxy.matrix import Matrix
from proxy.residency import AtMost, Exclusive, Group, Groups, Residency, Rules, Sets


@dataclass(frozen=True, slots=True)
class SwapFile:
    """llama-swap's configuration, as far as it matters here.

    `names`: every other name and the models that it stands for (none: they run on another machine).
    `limits`: requests per model that llama-swap takes at a time before it answers 429.
    """

    rules: Rules
    models: tuple[str, ...]
    names: Mapping[str, frozenset[str]]
    limits: Mapping[str, int]


def read_swap_file(path: Path) -> SwapFile:
    """Raises ConfigError that names the file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        return parse_swap_file(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def parse_swap_file(data: Any) -> SwapFile:
    """The parsed YAML of llama-swap's file. Raises ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError("must be a mapping with 'models'")
    models = {
        str(name): _section(model, f"models.{name}") for name, model in _section(data.get("models"), "models").items()
    }
    names: dict[str, frozenset[str]] = {}
    for model, section in models.items():
        names |= dict.fromkeys(_other_names(model, section), frozenset({model}))
    for peer, section in _section(data.get("peers"), "peers").items():
        for model in _section(section, f"peers.{peer}").get("models") or ():
            names[f"{peer}/{model}"] = frozenset()
    _add_chosen(data, models, names)
    limits = {model: limit for model, section in models.items() if (limit := _whole(section.get("concurrencyLimit")))}
    return SwapFile(_rules(data, models), tuple(models), names, limits)


def residency_of(config: Config, lease: str) -> Residency | None:
    """What is known about the models under a lease; None where nothing is. Raises ConfigError."""
    section = config.leases[lease]
    sources: list[Rules] = []
    names: dict[str, frozenset[str]] = {}
    limits: dict[str, int] = {}
    for name, upstream in config.upstreams.items():
        if upstream.lease != lease:
            continue
        if upstream.swap_config:
            try:
                file = read_swap_file(config.resolve(upstream.swap_config))
            except ConfigError as error:
                raise ConfigError(f"upstreams.{name}.swap_config: {error.message}") from None
            sources.append(file.rules)
            names |= file.names
            limits |= file.limits
        if upstream.exclusive:
            sources.append(Exclusive(upstream.exclusive))
        if upstream.models_max:
            sources.append(_at_most(config, name, upstream.models_max))
    matrix = None
    if section.matrix is not None:
        matrix = Matrix.read(section.matrix, f"leases.{lease}.matrix")
    if matrix is None and not sources:
        return None
    # A backend is one resident, whatever models its group calls it by.
    names |= {
        model: frozenset({group.backend})
        for group in config.groups.values()
        if group.backend is not None
        for model in group.models
        if model != group.backend
    }
    always = [name for name, backend in config.backends.items() if backend.resident == "always"]
    return Residency(
        sources, matrix=matrix, replaces=section.matrix_replaces, names=names, always=always, limits=limits
    )


def swap_files(config: Config) -> tuple[Path, ...]:
    """The files beside the configuration that residency depends on: to be watched like the configuration itself."""
    return tuple(config.resolve(upstream.swap_config) for upstream in config.upstreams.values() if upstream.swap_config)


def places(config: Config) -> Callable[[str], str | None]:
    """Where a model runs, by its name alone: the name of an upstream or a backend, or None."""
    classifier = Classifier(config)

    def place_of(model: str) -> str | None:
        if model in config.backends:
            return model
        group = config.groups.get(classifier.group_of(model) or "")
        return None if group is None else group.upstream or group.backend

    return place_of


def _at_most(config: Config, upstream: str, count: int) -> AtMost:
    place_of = places(config)
    models = (model for group in config.groups.values() for model in group.models if group.upstream == upstream)
    named = [model for model in models if not is_pattern(model)]
    return AtMost(count, upstream, lambda model: place_of(model) == upstream, named)


def _other_names(model: str, section: Mapping[str, Any]) -> Iterator[str]:
    for alias in section.get("aliases") or ():
        yield _plain(alias.get("id") if isinstance(alias, Mapping) else alias, model)
    filters = _section(section.get("filters"), f"models.{model}.filters")
    for name in _section(filters.get("setParamsByID"), f"models.{model}.filters.setParamsByID"):
        if (plain := _plain(name, model)) != model:
            yield plain


def _plain(name: Any, model: str) -> str:
    return str(name).replace("${MODEL_ID}", model)


def _add_chosen(data: Mapping[str, Any], models: Mapping[str, Any], names: dict[str, frozenset[str]]) -> None:
    """Names whose target is chosen per request, or changes while it runs: all that they can stand for, at once."""

    def targets(name: str, seen: frozenset[str]) -> frozenset[str]:
        if name in seen:
            return frozenset()
        found = set(names.get(name, {name} if name in models else ()))
        for target in chosen.get(name, ()):
            found |= targets(target, seen | {name})
        return frozenset(found)

    chosen: dict[str, list[str]] = {}
    for name, section in _section(data.get("selectors"), "selectors").items():
        chosen[str(name)] = [str(target) for target in _section(section, f"selectors.{name}").get("targets") or ()]
    for name, section in _section(data.get("profiles"), "profiles").items():
        pins = _section(section, f"profiles.{name}").get("pins")
        for pinned, target in _section(pins, f"profiles.{name}.pins").items():
            if target:
                chosen.setdefault(str(pinned), []).append(str(target))
    names |= {name: targets(name, frozenset()) for name in chosen}


def _rules(data: Mapping[str, Any], models: Mapping[str, Any]) -> Rules:
    old = [key for key in ("groups", "matrix") if data.get(key)]
    routing = _section(data.get("routing"), "routing")
    router = _section(routing.get("router"), "routing.router")
    settings = _section(router.get("settings"), "routing.router.settings")
    if old and router:
        raise ConfigError(f"has both '{old[0]}' and 'routing.router'; llama-swap refuses that")
    if len(old) == 2:
        raise ConfigError("has both 'groups' and 'matrix'; llama-swap refuses that")
    if old == ["matrix"]:
        return Sets(Matrix.read(data["matrix"]), models)
    use = router.get("use", "group")
    if use not in ("group", "matrix"):
        raise ConfigError(f"routing.router.use: '{use}' is neither 'group' nor 'matrix'")
    if use == "matrix":
        return Sets(Matrix.read(settings.get("matrix") or {}, "routing.router.settings.matrix"), models)
    return _groups(data["groups"] if old else settings.get("groups"), "groups", models)


def _groups(data: Any, where: str, models: Mapping[str, Any]) -> Groups:
    groups: list[Group] = []
    taken: dict[str, str] = {}
    for name, value in _section(data, where).items():
        section = _section(value, f"{where}.{name}")
        members = tuple(str(member) for member in section.get("members") or ())
        for member in members:
            if member in taken:
                raise ConfigError(f"{where}.{name}.members: '{member}' is in group '{taken[member]}' already")
            taken[member] = str(name)
        flags = {key: section[key] for key in ("swap", "exclusive", "persistent") if section.get(key) is not None}
        for key, flag in flags.items():
            if not isinstance(flag, bool):
                raise ConfigError(f"{where}.{name}.{key}: must be true or false")
        groups.append(Group(members, **flags))
    return Groups(groups, models)


def _section(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping")
    return value


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
