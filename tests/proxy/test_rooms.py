"""llama-swap's own file, and what the configuration adds by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import Config
from proxy.errors import ConfigError
from proxy.residency import Residency
from proxy.rooms import SwapFile, parse_swap_file, read_swap_file, residency_of, swap_files

MODELS = {"models": {"q": {"cmd": "x"}, "v": {"cmd": "x"}, "e": {"cmd": "x"}}}
MATRIX = {"vars": {"a": "q", "b": "v"}, "sets": {"all": "(a | b) & e"}}


def parse(text: str) -> SwapFile:
    return parse_swap_file(yaml.safe_load(text))


def residency(data: dict[str, Any]) -> Residency:
    file = parse_swap_file(data)
    return Residency([file.rules], names=file.names)


def together(rules: Residency, *models: str) -> bool:
    return all(rules.admits(frozenset(models) - {model}, model) for model in models)


def test_without_groups_and_matrix_models_take_turns() -> None:
    assert not together(residency(MODELS), "q", "e")


@pytest.mark.parametrize(
    "data",
    [
        MODELS | {"matrix": MATRIX},
        MODELS | {"routing": {"router": {"use": "matrix", "settings": {"matrix": MATRIX}}}},
    ],
)
def test_the_matrix_is_read_in_both_places(data: dict[str, Any]) -> None:
    assert together(residency(data), "q", "e")
    assert not together(residency(data), "q", "v")


@pytest.mark.parametrize("where", ["old", "new", "new by default"])
def test_groups_are_read_in_both_places(where: str) -> None:
    groups = {"always": {"members": ["e"], "persistent": True, "exclusive": False, "swap": False}}
    data: dict[str, Any] = MODELS | {"groups": groups}
    if where != "old":
        use = {"use": "group"} if where == "new" else {}
        data = MODELS | {"routing": {"router": {**use, "settings": {"groups": groups}}}}
    assert together(residency(data), "q", "e")
    assert not together(residency(data), "q", "v")


def test_a_router_uses_what_it_says_and_not_what_else_is_there() -> None:
    settings = {"matrix": MATRIX, "groups": {"pair": {"members": ["q", "v"], "swap": False}}}
    rules = residency(MODELS | {"routing": {"router": {"use": "group", "settings": settings}}})
    assert together(rules, "q", "v")
    assert not together(rules, "q", "e")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"groups": {"g": {}}, "matrix": MATRIX}, "both 'groups' and 'matrix'"),
        ({"matrix": MATRIX, "routing": {"router": {"use": "group"}}}, "both 'matrix' and 'routing.router'"),
        ({"routing": {"router": {"use": "dice"}}}, "'dice' is neither"),
        ({"matrix": {"sets": {"a": "q &"}}}, "matrix: sets.a: ends"),
        (
            {"groups": {"g": {"members": ["q"]}, "h": {"members": ["q"]}}},
            "groups.h.members: 'q' is in group 'g' already",
        ),
        ({"groups": {"g": {"swap": "yes"}}}, "groups.g.swap: must be true or false"),
        ({"models": ["q"]}, "models: must be a mapping"),
    ],
)
def test_what_llama_swap_would_refuse_is_refused_with_its_place(data: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_swap_file(data)
    assert complaint in str(caught.value)


def test_keys_and_macros_that_do_not_matter_are_nobodys_error() -> None:
    file = parse(
        """
        healthCheckTimeout: 60
        brand_new_key: [1, 2]
        macros: {dir: /models}
        models:
          q:
            cmd: llama-server --port ${PORT} -m ${dir}/q.gguf
            ttl: ${ttl}
            concurrencyLimit: 4
        """
    )
    assert file.models == ("q",)
    assert file.limits == {"q": 4}


def test_other_names_of_a_model() -> None:
    file = parse(
        """
        models:
          q27:
            aliases: [gpt-4o, {id: gpt-4o-mini, name: Mini}]
            filters: {setParamsByID: {"${MODEL_ID}": {}, "${MODEL_ID}:high": {}, fast: {}}}
        """
    )
    assert set(file.names) == {"gpt-4o", "gpt-4o-mini", "q27:high", "fast"}
    assert set(file.names.values()) == {frozenset({"q27"})}


def test_a_selector_is_each_of_its_targets_at_once() -> None:
    file = parse(
        """
        models: {q: {}, v: {aliases: [eye]}, e: {}}
        peers: {far: {models: [big]}}
        selectors: {smart: {strategy: spillover, targets: [q, eye, far/big]}}
        """
    )
    assert file.names["smart"] == frozenset("qv")
    assert file.names["far/big"] == frozenset()


def test_a_name_that_a_profile_pins_is_itself_and_every_target() -> None:
    file = parse(
        """
        models: {q: {}, v: {}, e: {}}
        profiles:
          work: {pins: {q: v, off: "", loop: loop}}
          play: {pins: {q: e, other: null}}
        """
    )
    assert file.names["q"] == frozenset("qve")
    assert file.names["loop"] == frozenset()
    assert "off" not in file.names


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_swap_file(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_swap_file(path)


# The configuration


def config(tmp_path: Path, **keys: Any) -> Config:
    base: dict[str, Any] = {
        "leases": {"gpu0": {}, "gpu1": {}},
        "upstreams": {"swap": {"url": "http://127.0.0.1:1"}},
        "groups": {"chat": {"mode": "read", "upstream": "swap", "models": ["q", "v*"]}},
        "path": tmp_path / "config.yaml",
    }
    return Config.model_validate(base | keys)


def test_where_nothing_is_known_there_is_no_residency(tmp_path: Path) -> None:
    assert residency_of(config(tmp_path), "gpu0") is None


def test_the_file_of_an_upstream_counts_for_its_lease_alone(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(MODELS | {"matrix": MATRIX}))
    subject = config(tmp_path, upstreams={"swap": {"url": "http://127.0.0.1:1", "swap_config": "swap.yaml"}})
    rules = residency_of(subject, "gpu0")
    assert rules is not None
    assert together(rules, "q", "e")
    assert not together(rules, "q", "v")
    assert residency_of(subject, "gpu1") is None
    assert swap_files(subject) == (tmp_path / "swap.yaml",)


def test_a_fault_in_the_file_of_an_upstream_names_the_upstream(tmp_path: Path) -> None:
    subject = config(tmp_path, upstreams={"swap": {"url": "http://127.0.0.1:1", "swap_config": "none.yaml"}})
    with pytest.raises(ConfigError, match=r"upstreams\.swap\.swap_config: .*none\.yaml"):
        residency_of(subject, "gpu0")


def test_lists_by_hand(tmp_path: Path) -> None:
    subject = config(tmp_path, upstreams={"swap": {"url": "http://127.0.0.1:1", "exclusive": [["q", "v"]]}})
    rules = residency_of(subject, "gpu0")
    assert rules is not None
    assert not together(rules, "q", "v")
    assert together(rules, "q", "e")


def test_so_many_models_of_one_upstream(tmp_path: Path) -> None:
    subject = config(
        tmp_path,
        upstreams={
            "router": {"url": "http://127.0.0.1:1", "models_max": 1},
            "other": {"url": "http://127.0.0.1:2"},
        },
        backends={"voice": {"kind": "hibari"}},
        groups={
            "chat": {"mode": "read", "upstream": "router", "models": ["q", "v*"]},
            "embed": {"mode": "read", "upstream": "other", "models": ["e"]},
        },
        default_group="chat",
    )
    rules = residency_of(subject, "gpu0")
    assert rules is not None
    assert not together(rules, "q", "v2")
    assert not together(rules, "q", "unheard-of")
    assert together(rules, "q", "e")
    assert together(rules, "q", "voice")


def test_the_matrix_of_a_lease_names_backends_beside_models(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(MODELS | {"matrix": MATRIX}))
    keys: dict[str, Any] = {
        "upstreams": {"swap": {"url": "http://127.0.0.1:1", "swap_config": "swap.yaml"}},
        "backends": {"voice": {"kind": "hibari"}},
        "leases": {"gpu0": {"matrix": {"sets": {"all": "(q | v | voice) & e"}}}},
    }
    rules = residency_of(config(tmp_path, **keys), "gpu0")
    assert rules is not None
    assert rules.words()[0] == "q excludes v and voice; e stays"
    keys["backends"]["voice"]["resident"] = "always"
    rules = residency_of(config(tmp_path, **keys), "gpu0")
    assert rules is not None
    assert together(rules, "q", "voice")


def test_a_fault_in_the_matrix_of_a_lease_names_the_lease(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leases\.gpu0\.matrix: sets\.a: there is no set 'b'"):
        residency_of(config(tmp_path, leases={"gpu0": {"matrix": {"sets": {"a": "+b"}}}}), "gpu0")
