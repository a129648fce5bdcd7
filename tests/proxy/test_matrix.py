"""Expressions of sets, against the same expressions multiplied out."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import ConfigError
from proxy.matrix import Matrix
from tests.fakes.residency import all_sets


def matrix(*expressions: str, **variables: str) -> Matrix:
    return Matrix({f"s{index}": text for index, text in enumerate(expressions)}, variables, {})


def has(subject: Matrix, *models: str) -> bool:
    return subject.has(frozenset(models))


def test_alternatives_exclude_each_other_and_what_is_united_stays() -> None:
    subject = matrix("(q | v | t) & e")
    assert has(subject, "q", "e")
    assert has(subject, "t")
    assert not has(subject, "q", "v")
    assert not has(subject, "q", "t", "e")


def test_and_binds_tighter_than_or() -> None:
    subject = matrix("a & b | c")
    assert has(subject, "a", "b")
    assert not has(subject, "a", "c")


def test_a_variable_wins_over_a_model_of_the_same_name() -> None:
    subject = matrix("q & e", q="Qwen/q:27b")
    assert subject.models == ("Qwen/q:27b", "e")
    assert not has(subject, "q")


def test_a_reference_stands_for_another_set_also_for_a_later_one() -> None:
    subject = Matrix({"all": "+llms & e", "llms": "q | v"}, {}, {})
    assert has(subject, "q", "e")
    assert not has(subject, "q", "v")


def test_a_model_on_both_sides_of_an_and_may_go_to_either() -> None:
    subject = matrix("(a | b) & (a | c)")
    assert has(subject, "a", "c")
    assert has(subject, "b", "c")
    assert has(subject, "a", "b")
    assert not has(subject, "a", "b", "c")


def test_a_model_in_no_set_is_in_no_combination() -> None:
    assert not has(matrix("a & b"), "z")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "ends where a model is expected"),
        ("a &", "ends where a model is expected"),
        ("a b", "'b' is not expected here"),
        ("(a | b", "a parenthesis is not closed"),
        ("a | & b", "'&' stands where a model is expected"),
        ("a * b", "'*' is not part of an expression"),
        ("a & +nowhere", "there is no set 'nowhere'"),
        ("a & +s0", "contains itself: s0 -> s0"),
        ("(" * 500 + "a" + ")" * 500, "inside each other"),
    ],
)
def test_what_is_not_an_expression_is_refused_with_the_name_of_its_set(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        matrix(text)
    assert "sets.s0: " in str(caught.value)
    assert complaint in str(caught.value)


def test_sets_that_contain_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="contains itself: a -> b -> c -> a"):
        Matrix({"a": "x & +b", "b": "y | +c", "c": "+a"}, {}, {})


def test_a_long_chain_of_references_is_refused_before_it_ends_the_recursion() -> None:
    sets = {f"s{index}": f"m | +s{index + 1}" for index in range(2000)} | {"s2000": "m"}
    with pytest.raises(ConfigError, match="inside each other"):
        Matrix(sets, {}, {})
    with pytest.raises(ConfigError, match="inside each other"):
        Matrix(dict(reversed(sets.items())), {}, {})


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "matrix: must be a mapping"),
        ({"sets": []}, "matrix: sets: must be a mapping"),
        ({"sets": {"a": 1}}, "matrix: sets.a: must be an expression"),
        ({"vars": {"a": ["b"]}}, "matrix: vars.a: must be the id of a model"),
        ({"evict_costs": {"a": 0}}, "matrix: evict_costs.a: must be at least 1"),
        ({"evict_costs": {"a": True}}, "matrix: evict_costs.a: must be a whole number"),
    ],
)
def test_a_matrix_of_the_wrong_shape_is_refused_with_its_key(data: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Matrix.read(data)


def test_ten_groups_of_ten_alternatives_are_not_multiplied_out() -> None:
    groups = [[f"m{group}{index}" for index in range(10)] for group in range(10)]
    subject = matrix(" & ".join("(" + " | ".join(models) + ")" for models in groups))
    assert has(subject, *(models[3] for models in groups))
    assert not has(subject, *(models[3] for models in groups), "m00")


def test_ten_alternatives_on_each_of_ten_sides_are_not_multiplied_out_either() -> None:
    models = [f"m{index}" for index in range(11)]
    subject = matrix(" & ".join(["(" + " | ".join(models) + ")"] * 10))
    assert has(subject, *models[:10])
    assert not has(subject, *models)


NAMES = st.sampled_from("abcde")
EXPRESSIONS = st.recursive(
    NAMES | st.just("+other"),
    lambda inner: st.tuples(st.lists(inner, min_size=2, max_size=3), st.sampled_from("|&")).map(
        lambda parts: "(" + f" {parts[1]} ".join(parts[0]) + ")"
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, st.sampled_from(["a & (b | c)", "d | e", "(a | b) & (c | d)"]))
def test_walking_the_tree_says_what_multiplying_out_says(text: str, other: str) -> None:
    sets = {"main": text, "other": other}
    combinations_ = all_sets({"vars": {}, "sets": sets})
    subject = Matrix(sets, {}, {})
    for size in range(1, 6):
        for models in map(frozenset, combinations("abcde", size)):
            assert subject.has(models) == any(models <= combination for combination in combinations_)
