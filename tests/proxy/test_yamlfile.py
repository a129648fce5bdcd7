from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import ConfigError
from proxy.yamlfile import YamlFile


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        YamlFile("config.yaml", text)
    return caught.value.message


def test_a_key_and_a_list_item_know_their_line() -> None:
    file = YamlFile("config.yaml", "a:\n  b:\n    - x\n    - c: 1\n  2: y\n")
    assert file.data == {"a": {"b": ["x", {"c": 1}], 2: "y"}}
    assert file.where(("a", "b", 1, "c")) == "config.yaml:4"
    assert file.where(("a", 2)) == "config.yaml:5"


def test_a_key_that_is_not_written_has_the_line_of_what_encloses_it() -> None:
    file = YamlFile("config.yaml", "x: 1\na:\n  b: 1\n")
    assert file.where(("a", "c", "d")) == "config.yaml:2"
    assert file.where(("missing",)) == "config.yaml"


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a"),
        ("a:\n  b:\n    - {c: 1, d: 2, c: 3}\n", 3, "a.b.0.c"),
        ("{a: 1,\n'a': 2}", 2, "a"),
    ],
)
def test_a_duplicate_key_is_an_error_with_its_line(text: str, line: int, key: str) -> None:
    assert refused(text) == f"config.yaml:{line}: duplicate key '{key}'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1, 2\n", 3),
        ("a:\n\t- b\n", 2),
        ("a: *nowhere\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2),
        ("a: 1\nb: 2024-99-99\n", 2),
        ("a: 1\n\nb: 0x_\n", 3),
        ("a: 1\nb: '\x01'\n", 2),
        ("a: 1\n? [b, c]\n: 2\n", 2),
        ("a: 1\n? {b: c}\n: 2\n", 2),
    ],
)
def test_what_is_not_yaml_is_an_error_with_its_line(text: str, line: int) -> None:
    assert refused(text).startswith(f"config.yaml:{line}: ")


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: {c: *x}}", "a: &x {<<: *x}", "&x [[*x]]"])
def test_an_anchor_inside_itself_is_an_error(text: str) -> None:
    assert "inside itself" in refused(text)


@pytest.mark.parametrize("text", ["- " * 1200 + "x", "{a: " * 1200 + "1" + "}" * 1200])
def test_endless_nesting_is_an_error(text: str) -> None:
    assert refused(text) == "config.yaml: not valid YAML: nested too deeply"


def test_anchors_cost_no_more_than_their_text() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    lists = "".join(f"{key}: &{key} [{', '.join(['*' + before] * 9)}]\n" for before, key in pairwise(names))
    merges = "".join(f"m{key}: &m{key} {{<<: [{', '.join(['*m' + b] * 9)}]}}\n" for b, key in pairwise(names))
    file = YamlFile("config.yaml", f"a: &a [x]\n{lists}ma: &ma {{x: 1}}\n{merges}")
    assert file.data["mz"] == {"x": 1}
    assert file.where(("z",)) == "config.yaml:26"


def test_of_merged_keys_the_own_one_counts_then_the_first_that_was_merged() -> None:
    file = YamlFile("config.yaml", "a: &a {x: 1, y: 1, z: 1}\nb: &b {x: 2, y: 2}\nc:\n  <<: [*b, *a]\n  x: 3\n")
    assert file.data["c"] == {"x": 3, "y": 2, "z": 1}


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:

    folder = tmp_path
    (folder / "latin.yaml").write_bytes(b"a: \xe9\n")
    for name in ("missing.yaml", "latin.yaml", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            YamlFile.read(folder / name)


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab:- \n[]{}&*<>?!|'\"#%0x_.,2024-é\x01\t"), max_size=60))
def test_any_text_is_parsed_or_refused_with_its_file(text: str) -> None:
    answer = "config.yaml"
    try:
        YamlFile(answer, text)
    except ConfigError as error:
        answer = error.message
    assert answer.startswith("config.yaml")
