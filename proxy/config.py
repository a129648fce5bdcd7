"""The configuration: frozen sections, each key with its default, one strict load.

Loading touches nothing but the file. An unknown or duplicate key, a value of the wrong kind, or a name that
points nowhere is a ConfigError that says file, line, key and what would be right. config.yaml shows every key.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from yarl import URL

from proxy.errors import ConfigError
from proxy.line import Mode
from proxy.yamlfile import Loc, YamlFile

_UNITS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _seconds(value: Any) -> Any:
    """30, 0.5, "30s", "5m", "2h" -> seconds."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", value.strip())):
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError('must be seconds, or a duration such as "500ms", "30s", "5m", "2h" or "1d"')  # noqa: TRY004
    return value


def _bytes(value: Any) -> Any:
    """1048576, "1MiB", "64 MB" -> bytes."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.strip().lower())):
        return int(float(match[1]) * _SIZES[match[2] or ""])
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError('must be bytes, or a size such as "500kB", "64MiB" or "1GiB"')  # noqa: TRY004
    return value


def _strip_slash(url: str) -> str:
    try:
        valid = re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url) and URL(url).port
    except ValueError:  # a port that is none
        valid = None
    if not valid:
        raise ValueError("must be a URL such as http://127.0.0.1:8080")
    return url.rstrip("/")


def _address(listen: str) -> str:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})", listen)
    if match is None or int(match[1]) > 65535:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9292 or [::1]:9292")
    return listen


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError("a name has 1 to 64 letters, digits, '_', '.' and '-', and begins with a letter or a digit")
    return name


def _path(path: str) -> str:
    if not re.fullmatch(r"(/[^/\s]+)+", path):
        raise ValueError("must be a path such as /v1/embeddings")
    return path


def _words(command: str) -> str:
    shlex.split(command)  # ValueError: a quotation mark without its other
    return command


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
Count = Annotated[int, Field(strict=True)]
Url = Annotated[str, AfterValidator(_strip_slash)]
Name = Annotated[str, AfterValidator(_name)]
Endpoint = Annotated[str, AfterValidator(_path)]
Key = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A part of the file: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Cors(Section):
    """Which web pages may call. "loopback" stands for pages served from this machine; "*" for all."""

    origins: tuple[str, ...] = ("loopback",)


class Log(Section):
    """How the program's own log looks."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class LeaseConfig(Section):
    """One lease: one GPU. docs/design.md has the reasons for the orders."""

    order: Literal["phases", "fifo"] = "phases"
    slice: Literal["auto"] | Seconds = "auto"
    max_slice: Seconds = 30
    patience: Seconds = 0
    max_wait: Seconds = 600
    max_waiting: Annotated[Count, Field(ge=0)] = 1000
    max_hold: Seconds = 1800
    slow_wait: Seconds = 2
    heartbeat: Seconds = 5
    heartbeat_interval: Annotated[Seconds, Field(gt=0)] = 10
    matrix: Mapping[str, Any] | None = None
    matrix_replaces: bool = False


class Timeouts(Section):
    """Limits of one exchange with an upstream; every clock starts after the grant."""

    connect: Seconds = 5
    first_byte: Seconds = 600
    idle: Seconds = 300


class Upstream(Section):
    """A model server that requests are forwarded to, and how to start it where that is our task."""

    url: Url
    lease: Name = "gpu0"
    api_key: str = ""
    forward_client_key: bool = False
    timeouts: Timeouts = Timeouts()
    load_timeout: Seconds = 120
    failed_load_backoff: Seconds = 10
    max_in_flight: Annotated[Count, Field(ge=1)] = 10
    command: Annotated[str, AfterValidator(_words)] | tuple[str, ...] = ""
    health: str = "/health"
    swap_config: str = ""
    exclusive: tuple[tuple[str, ...], ...] = ()
    models_max: Annotated[Count, Field(ge=0)] = 0


class Backend(Section):
    """A speech model in this process. `options` belong to its kind, which checks them."""

    kind: str
    lease: Name = "gpu0"
    resident: Literal["swap", "always"] = "swap"
    options: Mapping[str, Any] = {}


class Group(Section):
    """Models that are treated alike: their mode, and where they run."""

    mode: Mode
    models: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    upstream: Name | None = None
    backend: Name | None = None
    heartbeat: Literal["comment", "chunk", "off"] = "comment"
    pad_json: bool = False

    @model_validator(mode="after")
    def _one_place(self) -> "Group":
        if (self.upstream is None) == (self.backend is None):
            raise ValueError("a group runs at one place: give either 'upstream' or 'backend'")
        if self.backend is not None and self.mode is not Mode.WRITE:
            raise ValueError("a backend needs the GPU alone: 'mode' must be 'write'")
        return self


class Speech(Section):
    """POST /v1/audio/speech, voices and speech jobs."""

    voice: str = ""
    voices: Mapping[str, str] = {}
    max_input: Annotated[Count, Field(ge=1)] = 4096
    max_upload: Bytes = 10 * 2**20
    job_slice: Annotated[Seconds, Field(gt=0)] = 30
    job_ttl: Annotated[Seconds, Field(gt=0)] = 86400
    max_jobs: Annotated[Count, Field(ge=1)] = 100


class Tracing(Section):
    """OpenTelemetry; needs the `otel` extra. Empty endpoint: off."""

    endpoint: str = ""
    service_name: str = "llama-lease"


class Config(Section):
    """The whole file."""

    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:9292"
    api_keys: tuple[Key, ...] = ()
    admin_keys: tuple[Key, ...] = ()
    cors: Cors = Cors()
    allowed_hosts: tuple[str, ...] = ("loopback",)
    max_body: Bytes = 64 * 2**20
    drain_timeout: Seconds = 30
    data_dir: str = "data"
    log: Log = Log()
    tracing: Tracing = Tracing()
    leases: Mapping[Name, LeaseConfig] = {"gpu0": LeaseConfig()}
    upstreams: Mapping[Name, Upstream] = {}
    backends: Mapping[Name, Backend] = {}
    groups: Mapping[Name, Group] = {}
    default_group: Name | None = None
    aliases: Mapping[str, str] = {}
    speech: Speech = Speech()
    path: Path = Field(default=Path("config.yaml"), exclude=True, repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`, the host without brackets."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def base_dir(self) -> Path:
        """What relative paths in the file are relative to: the file's own folder."""
        return self.path.resolve().parent

    def resolve(self, path: str) -> Path:
        """A path of the file, made absolute; `~` is the user's home."""
        return self.base_dir / Path(path).expanduser()


def load(path: Path) -> Config:
    """Read, parse and check a configuration file. Raises ConfigError."""
    return parse(YamlFile.read(path), path)


def parse(file: YamlFile, path: Path = Path("config.yaml")) -> Config:
    """Check a parsed file and its cross-references. Raises ConfigError with every fault found, a line each."""
    if not isinstance(file.data, dict):
        raise ConfigError(f"{file.name}: must be a mapping of keys, see the example config.yaml")
    if "path" in file.data:
        raise ConfigError(f"{file.where(('path',))}: unknown key 'path'")
    try:
        config = Config.model_validate({**file.data, "path": path})
    except ValidationError as error:
        _fail(_explain(file, error.errors(include_input=False)))
    _fail(f"{file.where(loc)}: {'.'.join(map(str, loc))}: {message}" for loc, message in _dangling(config))
    return config


def _fail(faults: Iterable[str]) -> None:
    if lines := list(faults):
        raise ConfigError("\n".join(lines))


def _explain(file: YamlFile, faults: Iterable[Any]) -> Iterator[str]:
    """pydantic's faults in our words: `config.yaml:12: leases.gpu0: unknown key 'max_wiat', did you mean ...?`"""
    wrong: dict[Loc, dict[str, None]] = {}
    for fault in faults:
        loc = _in_file(file.data, fault["loc"])
        if fault["type"] != "extra_forbidden":
            wrong.setdefault(loc, {})[_in_words(fault)] = None
            continue
        *parents, key = loc
        close = difflib.get_close_matches(str(key), _keys_at(tuple(parents)), n=1)
        hint = f", did you mean '{close[0]}'?" if close else ""
        place = f"{'.'.join(map(str, parents))}: " if parents else ""
        yield f"{file.where(loc)}: {place}unknown key '{key}'{hint}"
    for loc, messages in wrong.items():  # one line for each value: of a union, each branch has complained
        yield f"{file.where(loc)}: {'.'.join(map(str, loc))}: {', or '.join(messages)}"


def _in_file(data: Any, loc: Loc) -> Loc:
    """The part of pydantic's location that is keys and indexes of the file; branches of unions and the like are not."""
    found: list[str | int] = []
    for part in loc:
        if isinstance(data, list):
            if isinstance(part, int) and part < len(data):
                found.append(part)
                data = data[part]
        elif isinstance(data, dict) and part != "[key]":
            found.append(part)
            data = data.get(part)
    return tuple(found)


def _in_words(fault: Any) -> str:
    match fault["type"]:
        case "missing":
            return "is missing"
        case "tuple_type":
            return "must be a list"
        case "model_type" | "dict_type" | "mapping_type":
            return "must be a mapping of keys"
        case "string_type":
            return "must be text; quotation marks make it so"
        case "string_too_short":
            return "must not be empty"
    return str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")


def _keys_at(loc: Loc) -> list[str]:
    """The keys that the section at `loc` knows, for "did you mean"."""
    kind: Any = Config
    for part in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        else:  # a mapping's key or a list's index: the type of its values comes last
            kind = get_args(kind)[-1] if get_args(kind) else None
    return [key for key in getattr(kind, "model_fields", ()) if key != "path"]


def _dangling(config: Config) -> Iterable[tuple[Loc, str]]:
    """Names that point nowhere, and models that two groups claim."""

    def missing(kind: str, name: str, known: Iterable[str]) -> str:
        known = list(known)
        close = difflib.get_close_matches(name, known, n=1)
        return f"no {kind} is named '{name}'" + (
            f", did you mean '{close[0]}'?" if close else f"; there are: {', '.join(known) or 'none'}"
        )

    for section in ("upstreams", "backends"):
        for name, place in getattr(config, section).items():
            if place.lease not in config.leases:
                yield (section, name, "lease"), missing("lease", place.lease, config.leases)
    claimed: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, group in config.groups.items():
        if group.upstream is not None and group.upstream not in config.upstreams:
            yield ("groups", name, "upstream"), missing("upstream", group.upstream, config.upstreams)
        if group.backend is not None and group.backend not in config.backends:
            yield ("groups", name, "backend"), missing("backend", group.backend, config.backends)
        for index, model in enumerate(group.models):
            if model in claimed:
                yield ("groups", name, "models", index), f"model '{model}' is in group '{claimed[model]}' already"
            claimed[model] = name
        for index, path in enumerate(group.endpoints):
            if path in taken:
                yield ("groups", name, "endpoints", index), f"group '{taken[path]}' has '{path}' already"
            taken[path] = name
    if config.default_group is not None and config.default_group not in config.groups:
        yield ("default_group",), missing("group", config.default_group, config.groups)
    for alias in config.aliases:
        if config.aliases[alias] in config.aliases:
            yield ("aliases", alias), "an alias must name a model, not another alias"
        elif alias in claimed:
            yield ("aliases", alias), f"'{alias}' is a model of group '{claimed[alias]}' already"
