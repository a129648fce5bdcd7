"""What one request is: the facts of its head and body -> model, group, mode and place. Pure.

The table of paths is llama-swap's, which is the widest of the servers that the proxy fronts.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from proxy.config import Config, Group
from proxy.errors import BadRequest, NotFound
from proxy.line import Mode

COMFYUI_MODEL = "comfyui_auto"
ALL_MODELS = "*"
"""The model of a ticket that concerns every model of an upstream: unloading them all."""


class Source(StrEnum):
    """Where a request names its model."""

    BODY = "body"
    QUERY = "query"
    PATH = "path"
    FIXED = "fixed"
    UNLOAD = "unload"
    NOWHERE = "nowhere"


_LONGEST_NAME = 512
_BODY = frozenset(
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/infill",
        "/completion",
        "/v1/audio/speech",
        "/v1/audio/voices",
        "/v1/images/generations",
        "/sdapi/v1/txt2img",
        "/sdapi/v1/img2img",
        "/audioapi/v1/tasks/run",
        "/v/chat/completions",
        "/v/responses",
        "/v/completions",
        "/v/messages",
        "/v/messages/count_tokens",
        "/v/embeddings",
        "/v/rerank",
        "/v/reranking",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/edits",
        "/v1/images/variations",
    ]
)
_QUERY = frozenset(["/v1/audio/voices", "/sdapi/v1/loras", "/props"])


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done with a request.

    `mode` None: no lease, for paths that load no model. `model` is the name that the upstream gets; `why` says
    in words how the decision was made.
    """

    model: str
    group: str
    mode: Mode | None
    upstream: str | None
    backend: str | None
    why: str


def normalise(raw_path: str) -> str:
    """The path to compare with and to send on: doubled and trailing slashes gone.

    Percent signs stay, for %2F in an id is no slash; but not where they stand for what never needs one, and not in a
    path that loads a model: /v1/ch%61t%2Fcompletions, which many servers read as we do, must not get past the lease.
    """
    path = re.sub(r"%[0-9A-Fa-f]{2}", lambda sign: _unquoted(sign[0]), raw_path) if "%" in raw_path else raw_path
    path = _slashes(path)
    if "%" in path and (plain := _slashes(unquote(path))) in _BODY | _QUERY | {"/unload"}:
        return plain
    return path


def _slashes(path: str) -> str:
    return (re.sub(r"/{2,}", "/", path) if "//" in path else path).rstrip("/") or "/"


def has_dots(path: str) -> bool:
    """Whether a normalised path has a segment `.` or `..`: it would mean another path to an upstream than to us."""
    return not {".", ".."}.isdisjoint(path.split("/"))


def _unquoted(sign: str) -> str:
    char = chr(int(sign[1:], 16))
    return char if char.isascii() and (char.isalnum() or char in "-._~") else sign


def is_pattern(model: str) -> bool:
    """Whether a name in a group's `models` stands for all names that it matches."""
    return any(char in model for char in "*?[")


def source(method: str, path: str) -> Source:
    """Where a request for this (normalised) path names its model."""
    if method in ("HEAD", "OPTIONS"):
        return Source.NOWHERE
    if method == "POST" and path in _BODY:
        return Source.BODY
    if path.startswith("/upstream/"):
        return Source.PATH
    if path == "/comfyui" or path.startswith("/comfyui/"):
        return Source.FIXED
    if (method == "POST" and re.match(r"/api/models/unload(/|$)", path)) or (method == "GET" and path == "/unload"):
        return Source.UNLOAD
    if method == "GET" and path in _QUERY:
        return Source.QUERY
    return Source.NOWHERE


def _check_name(model: str, where: str) -> None:
    """Names are kept: in metrics, in the record of the last tickets, in the log."""
    if len(model) > _LONGEST_NAME:
        raise BadRequest(f"{where} is over {_LONGEST_NAME} characters, longer than any name", param="model")
    if not model.isprintable():
        raise BadRequest(f"{where} holds characters that no name has", param="model")


class Classifier:
    """The groups of one configuration, ready to be asked."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._exact = {model: name for name, group in config.groups.items() for model in group.models}
        self._globs = [
            (re.compile(fnmatch.translate(model)), name)
            for name, group in config.groups.items()
            for model in group.models
            if is_pattern(model)
        ]
        self._endpoints = {path: name for name, group in config.groups.items() for path in group.endpoints}

    def plan(
        self,
        method: str,
        path: str,
        model: str | None = None,
        *,
        where: Source | None = None,
        known: Callable[[str], str] = str,
    ) -> Plan:
        """The plan for a request; `path` is normalised, `model` is what the body or the query named.

        `where`: in place of what `source` says. `known` maps an upstream's own alias to the model's id (llama-swap's `aliases`), so that both wait as one.

        1. A path that loads no model takes no lease and goes to the default place.
        2. Unloading stops requests in flight: the write lease.
        3. `/upstream/<model>/...` names the model in the path, where ids may hold slashes: the longest that is named
           exactly, else the shortest that a pattern matches, else the first part.
        4. An alias of the configuration is replaced by its model, except in a path.
        5. The group is the one that names the model; else the one whose glob matches first; else the one whose
           `endpoints` has the path; else `default_group`. None of them: 404.

        Raises BadRequest (model missing) and NotFound, with param "model".
        """
        where = where or source(method, path)
        if where is Source.NOWHERE:  # (1)
            return self._without_model(path)
        if where is Source.UNLOAD:  # (2)
            return self._unload(path, known)
        if where is Source.PATH:  # (3)
            model = self._model_in_path(path)
        elif where is Source.FIXED:
            model = COMFYUI_MODEL
        if not model:
            if where is Source.QUERY:
                raise BadRequest(
                    "the query parameter 'model' is missing; it names the model that answers", param="model"
                )
            raise BadRequest("the field 'model' is missing; it names the model that answers", param="model")
        _check_name(model, "the model in the path" if where is Source.PATH else "the field 'model'")
        name = model if where is Source.PATH else self._config.aliases.get(model, model)  # (4)
        renamed = f"alias of '{name}', which is " if name != model else ""
        group, why = self._group_of(name, path, known)  # (5)
        if group is None:
            raise NotFound(
                f"the model '{model}' does not exist here: no group names it, and there is no default_group",
                param="model",
                code="model_not_found",
            )
        found = self._config.groups[group]
        return Plan(name, group, found.mode, found.upstream, found.backend, f"'{model}' is {renamed}{why}")

    def default_upstream(self) -> str | None:
        """Where requests that name no model go: the default group's upstream, else the first."""
        group = self._config.groups.get(self._config.default_group or "")
        if group is not None and group.upstream is not None:
            return group.upstream
        return next(iter(self._config.upstreams), None)

    def names(self, model: str) -> bool:
        """Whether a group names this model exactly."""
        return model in self._exact

    def group_of(self, model: str) -> str | None:
        """The group of a model by its name alone, whatever the path; None where no group takes it."""
        return self._group_of(model, "", str)[0]

    def models(self) -> Iterator[tuple[str, str, Group]]:
        """Every model that the configuration names exactly: (model, group's name, group)."""
        for name, group in self._config.groups.items():
            for model in group.models:
                if not is_pattern(model):
                    yield model, name, group

    def _without_model(self, path: str) -> Plan:
        upstream = self.default_upstream()
        if upstream is None:
            raise NotFound(f"nothing answers {path} here")
        return Plan("", "", None, upstream, None, f"{path} loads no model: no lease")

    def _unload(self, path: str, known: Callable[[str], str]) -> Plan:
        model = unquote(path.removeprefix("/api/models/unload").strip("/")) if path != "/unload" else ""
        if not model:
            upstream = self.default_upstream()
            if upstream is None:
                raise NotFound(f"nothing answers {path} here")
            return Plan(ALL_MODELS, "", Mode.WRITE, upstream, None, "unloading stops requests in flight: exclusive")
        _check_name(model, "the model in the path")
        name = self._config.aliases.get(model, model)
        group, _ = self._group_of(name, path, known)
        upstream = self._config.groups[group].upstream if group else self.default_upstream()
        if upstream is None:
            raise NotFound(f"no upstream has the model '{model}'", param="model", code="model_not_found")
        why = "unloading stops requests in flight: exclusive"
        return Plan(name, group or "", Mode.WRITE, upstream, None, why)

    def _model_in_path(self, path: str) -> str:
        parts = path.removeprefix("/upstream/").split("/")
        candidates = [unquote("/".join(parts[:count])) for count in range(len(parts), 0, -1)]
        for model in candidates:
            if model in self._exact:
                return model
        for model in reversed(candidates):  # a pattern that matches an id would match all of the path behind it, too
            if any(pattern.match(model) for pattern, _ in self._globs):
                return model
        return candidates[-1]

    def _group_of(self, model: str, path: str, known: Callable[[str], str]) -> tuple[str | None, str]:
        for name in dict.fromkeys((model, known(model))):
            if name in self._exact:
                return self._exact[name], f"named by group '{self._exact[name]}'"
            for pattern, group in self._globs:
                if pattern.match(name):
                    return group, f"matched by a pattern of group '{group}'"
        if path in self._endpoints:
            return self._endpoints[path], f"in no group; group '{self._endpoints[path]}' takes {path}"
        if self._config.default_group is not None:
            return self._config.default_group, f"in no group; '{self._config.default_group}' is the default_group"
        return None, ""
