import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from proxy import config
from proxy.config import (
    Backend,
    Config,
    Cors,
    Group,
    LeaseConfig,
    Log,
    Section,
    Speech,
    Timeouts,
    Tracing,
    Upstream,
    load,
    parse,
)
from proxy.errors import ConfigError
from proxy.line import Mode
from proxy.yamlfile import YamlFile

ROOT = Path(__file__).parents[2]
UPSTREAM = "upstreams: {u: {url: 'http://u'}}\n"


def read(text: str) -> Config:
    return parse(YamlFile("config.yaml", text))


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return caught.value.message.splitlines()


# Faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lissten: x\n", "config.yaml:1: unknown key 'lissten', did you mean 'listen'?"),
        ("a: 1\n", "config.yaml:1: unknown key 'a'"),
        ("path: x\n", "config.yaml:1: unknown key 'path'"),
        (
            "leases:\n  gpu0:\n    max_wiat: 1\n",
            "config.yaml:3: leases.gpu0: unknown key 'max_wiat', did you mean 'max_wait'?",
        ),
        (
            "upstreams:\n  u:\n    url: http://u\n    timeouts:\n      idel: 1\n",
            "config.yaml:5: upstreams.u.timeouts: unknown key 'idel', did you mean 'idle'?",
        ),
        (
            "groups:\n  g:\n    mode: read\n    upstream: u\n    model: [m]\n",
            "config.yaml:5: groups.g: unknown key 'model', did you mean 'models'?",
        ),
    ],
)
def test_an_unknown_key_has_its_line_and_the_key_that_was_meant(text: str, fault: str) -> None:
    assert refused(text) == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("listen: 9292\n", "config.yaml:1: listen: must be text; quotation marks make it so"),
        (
            "listen: localhost\n",
            "config.yaml:1: listen: must be an address and a port, such as 127.0.0.1:9292 or [::1]:9292",
        ),
        (
            "listen: 127.0.0.1:65536\n",
            "config.yaml:1: listen: must be an address and a port, such as 127.0.0.1:9292 or [::1]:9292",
        ),
        ("api_keys: secret\n", "config.yaml:1: api_keys: must be a list"),
        ("api_keys:\n  - good\n  - ''\n", "config.yaml:3: api_keys.1: must not be empty"),
        ("api_keys: [1234]\n", "config.yaml:1: api_keys.0: must be text; quotation marks make it so"),
        ("leases:\n", "config.yaml:1: leases: must be a mapping of keys"),
        ("leases:\n  gpu0:\n", "config.yaml:2: leases.gpu0: must be a mapping of keys"),
        (
            "leases:\n  'gpu 0': {}\n",
            ("config.yaml:2: leases.gpu 0: a name has 1 to 64 letters, digits, '_', '.' and '-', and begins with a letter "
            "or a digit"),
        ),
        ("leases:\n  gpu0: {max_wait: -1}\n", "config.yaml:2: leases.gpu0.max_wait: must be greater than or equal to 0"),
        ("leases:\n  gpu0: {max_wait: .inf}\n", "config.yaml:2: leases.gpu0.max_wait: must be a finite number"),
        (
            "leases:\n  gpu0:\n    slice: soon\n",
            ("config.yaml:3: leases.gpu0.slice: must be 'auto', or must be seconds, or a duration such as \"500ms\", "
            '"30s", "5m", "2h" or "1d"'),
        ),
        ("leases:\n  gpu0: {order: lifo}\n", "config.yaml:2: leases.gpu0.order: must be 'phases' or 'fifo'"),
        ("leases:\n  gpu0: {max_waiting: 1.5}\n", "config.yaml:2: leases.gpu0.max_waiting: must be a valid integer"),
        ("max_body: 0\n", "config.yaml:1: max_body: must be greater than 0"),
        ("upstreams:\n  u: {}\n", "config.yaml:2: upstreams.u.url: is missing"),
        (
            "upstreams:\n  u:\n    url: http://u\n    command: 7\n",
            "config.yaml:4: upstreams.u.command: must be text; quotation marks make it so, or must be a list",
        ),
        (
            "upstreams:\n  u:\n    url: http://u\n    command: serve 'it\n",
            "config.yaml:4: upstreams.u.command: No closing quotation, or must be a list",
        ),
        ("groups:\n  g:\n    mode: raed\n    upstream: u\n", "config.yaml:3: groups.g.mode: must be 'read', 'write' or 'none'"),
        (
            "groups:\n  g: {mode: read}\n",
            "config.yaml:2: groups.g: a group runs at one place: give either 'upstream' or 'backend'",
        ),
        (
            "groups:\n  g: {mode: write, upstream: u, backend: b}\n",
            "config.yaml:2: groups.g: a group runs at one place: give either 'upstream' or 'backend'",
        ),
        (
            "groups:\n  g: {mode: read, backend: b}\n",
            "config.yaml:2: groups.g: a backend needs the GPU alone: 'mode' must be 'write'",
        ),
        (
            UPSTREAM + "groups:\n  g:\n    mode: read\n    upstream: u\n    models:\n      - 4\n",
            "config.yaml:7: groups.g.models.0: must be text; quotation marks make it so",
        ),
        (
            UPSTREAM + "groups:\n  g: {mode: read, upstream: u, endpoints: [v1/embeddings/]}\n",
            "config.yaml:3: groups.g.endpoints.0: must be a path such as /v1/embeddings",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_has_its_line_its_key_and_what_would_be_right(text: str, fault: str) -> None:
    assert refused(text) == [fault]


@pytest.mark.parametrize(
    "url",
    ["u:80", "http://", "ftp://u", "http://u:99999", "http://u:port", "http://[::1", "http://u/?a=b", "http://u:0"],
)
def test_an_upstream_needs_a_url(url: str) -> None:
    assert refused(f"upstreams:\n  u:\n    url: '{url}'\n") == [
        "config.yaml:3: upstreams.u.url: must be a URL such as http://127.0.0.1:8080"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "upstreams:\n  u:\n    url: http://u\n    lease: gpu1\n",
            "config.yaml:4: upstreams.u.lease: no lease is named 'gpu1', did you mean 'gpu0'?",
        ),
        (
            "backends:\n  b: {kind: hibari, lease: fpga}\n",
            "config.yaml:2: backends.b.lease: no lease is named 'fpga'; there are: gpu0",
        ),
        (
            "upstreams:\n  chat: {url: 'http://u'}\ngroups:\n  g:\n    mode: read\n    upstream: chta\n",
            "config.yaml:6: groups.g.upstream: no upstream is named 'chta', did you mean 'chat'?",
        ),
        (
            "groups:\n  g:\n    mode: write\n    backend: voice\n",
            "config.yaml:4: groups.g.backend: no backend is named 'voice'; there are: none",
        ),
        ("default_group: g\n", "config.yaml:1: default_group: no group is named 'g'; there are: none"),
        (
            UPSTREAM
            + "groups:\n  g: {mode: read, models: [m], upstream: u}\n  h:\n    mode: read\n    models: [m]\n    upstream: u\n",
            "config.yaml:6: groups.h.models.0: model 'm' is in group 'g' already",
        ),
        (
            UPSTREAM
            + "groups:\n  g: {mode: read, endpoints: [/e], upstream: u}\n  h: {mode: read, endpoints: [/e], upstream: u}\n",
            "config.yaml:4: groups.h.endpoints.0: group 'g' has '/e' already",
        ),
        ("aliases:\n  a: b\n  b: c\n", "config.yaml:2: aliases.a: an alias must name a model, not another alias"),
        (
            UPSTREAM + "groups:\n  g: {mode: read, models: [m], upstream: u}\naliases:\n  m: n\n",
            "config.yaml:5: aliases.m: 'm' is a model of group 'g' already",
        ),
    ],
)
def test_a_name_that_points_nowhere_or_two_ways_has_its_line(text: str, fault: str) -> None:
    assert refused(text) == [fault]


def test_all_faults_are_told_at_once() -> None:
    assert len(refused("lissten: x\nmax_body: much\nleases: {gpu0: {order: lifo}}\n")) == 3


@pytest.mark.parametrize("text", ["", "- a\n", "7\n", "words\n"])
def test_a_file_is_a_mapping(text: str) -> None:
    assert refused(text) == ["config.yaml: must be a mapping of keys, see the example config.yaml"]


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*Config.model_fields, *LeaseConfig.model_fields, *Upstream.model_fields, "mode", "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_yaml_is_a_configuration_or_a_fault_with_its_file(data: Any) -> None:
    answer = "config.yaml"
    try:
        parse(YamlFile(answer, yaml.safe_dump(data)))
    except ConfigError as error:
        answer = error.message
    assert all(line.startswith("config.yaml") for line in answer.splitlines())


# Values


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("0", 0),
        ("'30'", 30),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("2 h", 7200),
        ("1d", 86400),
    ],
)
def test_a_duration_is_seconds_or_a_number_with_its_unit(written: str, seconds: float) -> None:
    assert read(f"drain_timeout: {written}\n").drain_timeout == seconds


@pytest.mark.parametrize("written", ["true", "[1]", "5 parsecs", "1h30m", "'-5s'", "''", "null", "1e999"])
def test_what_is_no_duration_is_refused(written: str) -> None:
    [fault] = refused(f"drain_timeout: {written}\n")
    assert fault.startswith("config.yaml:1: drain_timeout: must be")


@pytest.mark.parametrize(
    ("written", "size"),
    [("1000", 1000), ("64MiB", 64 << 20), ("64 MB", 64_000_000), ("1.5k", 1500), ("1Gi", 1 << 30), ("7b", 7)],
)
def test_a_size_is_bytes_or_a_number_with_its_unit(written: str, size: int) -> None:
    assert read(f"max_body: {written}\n").max_body == size


@pytest.mark.parametrize("written", ["true", "1.5", "-1", "0.0001k", "64 potatoes", "'64M 1'", ".nan", "null"])
def test_what_is_no_size_is_refused(written: str) -> None:
    [fault] = refused(f"max_body: {written}\n")
    assert fault.startswith("config.yaml:1: max_body: must be")


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("'[::1]:9292'", ("::1", 9292)), ("gpu.home:80", ("gpu.home", 80))],
)
def test_listen_is_an_address_and_a_port(listen: str, address: tuple[str, int]) -> None:
    assert read(f"listen: {listen}\n").address == address


def test_a_url_loses_its_trailing_slash() -> None:
    loaded = read("upstreams: {u: {url: 'http://u:8080/swap/'}}\n")
    assert loaded.upstreams["u"].url == "http://u:8080/swap"


def test_a_configuration_is_frozen() -> None:
    loaded = read("{}\n")
    with pytest.raises(ValueError, match="frozen"):
        loaded.listen = "0.0.0.0:80"


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data_dir: here\n")
    assert load(tmp_path / "config.yaml").resolve("here") == tmp_path / "here"
    assert load(tmp_path / "config.yaml").resolve("/there") == Path("/there")


# The files that we hand out


@pytest.mark.parametrize(
    "name", ["config.yaml", *sorted(f"examples/{p.name}" for p in (ROOT / "examples").glob("*.yaml"))]
)
def test_the_files_that_we_hand_out_are_valid(name: str) -> None:
    loaded = load(ROOT / name)
    assert loaded.groups


@pytest.mark.parametrize(
    "name", ["config.yaml", *sorted(f"examples/{p.name}" for p in (ROOT / "examples").glob("*.yaml"))]
)
def test_in_the_files_that_we_hand_out_every_endpoint_can_be_reached(name: str) -> None:
    """A pattern that takes every model would leave nothing to `endpoints`."""
    loaded = load(ROOT / name)
    if any(group.endpoints for group in loaded.groups.values()):
        assert not [model for group in loaded.groups.values() for model in group.models if model == "*"]


FILE = YamlFile.read(ROOT / "config.yaml").data
LINES = (ROOT / "config.yaml").read_text().splitlines()
SECTIONS: dict[type[BaseModel], list[dict[str, Any]]] = {
    Config: [FILE],
    Cors: [FILE["cors"]],
    Log: [FILE["log"]],
    Tracing: [FILE["tracing"]],
    Speech: [FILE["speech"]],
    LeaseConfig: [*FILE["leases"].values()],
    Upstream: [*FILE["upstreams"].values()],
    Timeouts: [upstream["timeouts"] for upstream in FILE["upstreams"].values() if "timeouts" in upstream],
    Backend: [*FILE["backends"].values()],
    Group: [*FILE["groups"].values()],
}


def keys(kind: type[BaseModel]) -> list[str]:
    return [key for key in kind.model_fields if key != "path"]


def test_no_section_of_the_configuration_is_left_out_below() -> None:
    assert set(SECTIONS) == {
        kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Section)
    } - {Section}


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_key_stands_in_config_yaml_with_a_comment(kind: type[BaseModel]) -> None:
    written = {key for part in SECTIONS[kind] for key in part}
    for key in keys(kind):
        lines = [line.strip() for line in LINES]
        told = [line for line in lines if re.match(rf"{key}:.*# |# {key}:", line)]
        section = [line for line in lines if re.fullmatch(rf"{key}:", line)]
        assert told or section, f"{key} has no comment"
        assert key in written or f"# {key}:" in "\n".join(told), f"{key} is missing"


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_a_value_of_config_yaml_is_the_default_or_its_comment_has_the_default(kind: type[BaseModel]) -> None:
    for key in keys(kind):
        field = kind.model_fields[key]
        default = field.get_default()
        if field.is_required() or not default or isinstance(default, BaseModel | dict):
            continue  # a choice that has no default, or a section of its own
        for part in SECTIONS[kind]:
            value = getattr(kind.model_validate(part), key)
            told = [line for line in LINES if line.strip().startswith(f"{key}:") and f"Default {default}" in line]
            assert value == default or told, f"{key} is {value!r}, its default is {default!r}"


def test_the_default_lease_is_gpu0() -> None:
    loaded = read(UPSTREAM + "groups: {g: {mode: read, upstream: u}}\n")
    assert list(loaded.leases) == ["gpu0"]
    assert loaded.upstreams["u"].lease == "gpu0"
    assert loaded.groups["g"].mode is Mode.READ
