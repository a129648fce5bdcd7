"""Which models can be resident together, against llama-swap's rules written the obvious way."""

from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.matrix import Matrix
from proxy.residency import AtMost, Exclusive, Group, Groups, Residency, Sets
from tests.fakes.residency import evictions

NOBODY: frozenset[str] = frozenset()


def matrix(*expressions: str, **costs: int) -> Matrix:
    return Matrix({f"s{index}": text for index, text in enumerate(expressions)}, {}, costs)


def swapper(expression: str, models: str = "") -> Sets:
    return Sets(matrix(expression), models.split())


def together(rules: Residency, *models: str) -> bool:
    return all(rules.admits(frozenset(models) - {model}, model) for model in models)


# One source


def test_models_in_no_group_take_turns() -> None:
    rules = Residency([Groups([], ["a", "b"])])
    assert not together(rules, "a", "b")


def test_a_group_without_swap_keeps_its_members() -> None:
    rules = Residency([Groups([Group(("a", "b"), swap=False)], ["a", "b", "c"])])
    assert together(rules, "a", "b")
    assert not together(rules, "a", "c")


def test_a_persistent_group_stays_beside_everything() -> None:
    rules = Residency([Groups([Group(("e",), swap=False, exclusive=False, persistent=True)], ["a", "e"])])
    assert together(rules, "a", "e")


def test_a_model_of_a_group_that_is_not_exclusive_joins_but_is_stopped_again() -> None:
    rules = Residency([Groups([Group(("x",), exclusive=False), Group(("y",))], ["x", "y"])])
    assert rules.admits(frozenset("y"), "x")
    assert not rules.admits(frozenset("x"), "y")
    assert rules.hinders(NOBODY, waiter="y", newcomer="x")
    assert not rules.hinders(NOBODY, waiter="x", newcomer="y")
    assert rules.excludes("x", "y")


def test_a_model_in_no_set_of_a_swapper_runs_alone() -> None:
    rules = Residency([swapper("q & e", "q e other")])
    assert not together(rules, "other", "e")
    assert rules.admits(NOBODY, "other")


def test_of_a_list_by_hand_one_model_at_a_time() -> None:
    rules = Residency([Exclusive([["a", "b"], ["b", "c"]])])
    assert together(rules, "a", "c")
    assert not together(rules, "a", "b")
    assert not together(rules, "b", "c")
    assert together(rules, "a", "unheard-of")


def test_a_server_keeps_so_many_models_whichever_they_are() -> None:
    rules = Residency([AtMost(2, "router", lambda model: model != "e")])
    assert together(rules, "a", "b", "e")
    assert not together(rules, "a", "b", "c")


# Several sources, and the lease's own matrix


def test_sources_judge_their_own_models_only() -> None:
    rules = Residency([swapper("a | b"), Exclusive([["c", "d"]])])
    assert together(rules, "a", "c")
    assert not together(rules, "a", "b")
    assert not together(rules, "c", "d")


def test_the_matrix_of_a_lease_adds_combinations() -> None:
    rules = Residency([swapper("(q | v) & e")], matrix=matrix("(q | v | voice) & e"))
    assert together(rules, "q", "e")
    assert together(rules, "voice", "e")
    assert not together(rules, "voice", "q")


def test_the_matrix_of_a_lease_may_allow_what_a_source_forbids() -> None:
    rules = Residency([swapper("q | v")], matrix=matrix("q & v"))
    assert together(rules, "q", "v")


def test_a_matrix_that_replaces_is_all_that_counts() -> None:
    rules = Residency([swapper("(q | v) & e")], matrix=matrix("q | voice"), replaces=True)
    assert not together(rules, "q", "e")
    assert not together(rules, "q", "voice")


def test_beside_the_matrix_of_a_lease_a_model_that_nobody_names_runs_alone() -> None:
    rules = Residency([swapper("q & e")], matrix=matrix("voice"))
    assert not together(rules, "voice", "unheard-of")
    assert not together(rules, "q", "unheard-of")


def test_what_is_always_resident_fits_beside_everything() -> None:
    rules = Residency([swapper("q | v")], matrix=matrix("q | v | voice"), always=["voice"])
    assert together(rules, "q", "voice")
    assert "voice" not in rules.models()


# Names


def test_an_alias_is_its_model() -> None:
    rules = Residency([swapper("q | v")], names={"gpt": frozenset("q")})
    assert rules.id("gpt") == "q"
    assert together(rules, "gpt", "q")
    assert not together(rules, "gpt", "v")


def test_a_name_whose_target_is_chosen_per_request_is_all_its_targets_at_once() -> None:
    rules = Residency([swapper("(q | v | t) & e")], names={"any": frozenset("qv")})
    assert together(rules, "any", "e")
    assert not together(rules, "any", "q")
    assert not together(rules, "any", "t")


def test_a_model_on_another_machine_excludes_nobody() -> None:
    rules = Residency([swapper("q | v")], names={"far/m": frozenset()}, matrix=matrix("q | voice"))
    assert together(rules, "q", "far/m")


# What a grant changes


def test_loading_a_model_stops_what_it_excludes_and_keeps_the_rest() -> None:
    rules = Residency([swapper("(q | v) & e")])
    assert rules.after(frozenset("qe"), frozenset("e"), "v") == frozenset("ve")


def test_what_costs_more_to_stop_is_kept() -> None:
    rules = Residency([Sets(matrix("a & b", "a & c", b=1, c=5), [])])
    assert rules.after(frozenset("bc"), NOBODY, "a") == frozenset("ac")


def test_what_is_held_is_kept_whatever_it_costs() -> None:
    rules = Residency([Sets(matrix("a & b", "a & c", b=1, c=5), [])])
    assert rules.after(frozenset("bc"), frozenset("b"), "a") == frozenset("ab")


def test_a_model_that_excludes_nobody_is_not_followed() -> None:
    rules = Residency([swapper("q | v")])
    assert rules.after(frozenset("q"), NOBODY, "unheard-of") == frozenset("q")


# Hindrance


def test_one_who_goes_with_everybody_hinders_nobody() -> None:
    rules = Residency([swapper("(q | v) & e")])
    assert not rules.hinders(frozenset("q"), waiter="v", newcomer="e")
    assert rules.hinders(frozenset("e"), waiter="v", newcomer="q")


def test_where_two_of_three_fit_the_second_hinders_the_third() -> None:
    rules = Residency([AtMost(2, "router", lambda model: True)])
    assert rules.hinders(frozenset("ab"), waiter="c", newcomer="a")
    assert not rules.hinders(NOBODY, waiter="c", newcomer="a")


def test_two_gpus_in_one_matrix_do_not_hinder_each_other() -> None:
    rules = Residency([swapper("(a | b) & (c | d)")])
    assert not rules.hinders(frozenset("ac"), waiter="b", newcomer="c")
    assert rules.hinders(frozenset("ac"), waiter="b", newcomer="a")


def test_ten_groups_of_ten_alternatives_answer_all_questions() -> None:
    models = [[f"m{group}{index}" for index in range(10)] for group in range(10)]
    rules = Residency([swapper(" & ".join("(" + " | ".join(group) + ")" for group in models))])
    held = frozenset(group[0] for group in models)
    assert not rules.admits(held, "m31")
    assert rules.hinders(held, waiter="m31", newcomer="m30")
    assert not rules.hinders(held, waiter="m31", newcomer="m40")
    assert rules.after(held, NOBODY, "m31") == held - {"m30"} | {"m31"}


# Words


def test_the_rules_in_words() -> None:
    rules = Residency([swapper("(q27 | vl | tts) & embed")])
    assert rules.words() == (
        "q27 excludes vl and tts; embed stays",
        "vl excludes q27 and tts; embed stays",
        "tts excludes q27 and vl; embed stays",
    )


def test_long_lists_are_cut_short_and_all_are_all() -> None:
    many = [f"m{index}" for index in range(20)]
    assert Residency([Groups([], many)]).words()[0] == "m0 excludes all others"
    rules = Residency([Exclusive([many])], matrix=matrix("(" + " | ".join(many) + ") & e"))
    assert rules.words()[0] == "m0 excludes m1, m10, m11, m12, m13, m14, m15, m16 and 11 more; e stays"


def test_a_bound_on_the_number_of_models_is_said_as_such() -> None:
    assert Residency([AtMost(2, "router", str.isalpha, ["a", "b"])]).words() == ("router keeps 2 models at a time",)
    assert Residency([AtMost(1, "router", str.isalpha, ["a", "b"])]).words()[0] == "a excludes b"


# Against the rules written the obvious way

MODELS = "abcde"
SUBSETS = [frozenset(models) for models in chain.from_iterable(combinations(MODELS, size) for size in range(5))]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        expressions = st.recursive(
            st.sampled_from(MODELS),
            lambda inner: st.tuples(st.lists(inner, min_size=2, max_size=3), st.sampled_from("|&")).map(
                lambda parts: "(" + parts[1].join(parts[0]) + ")"
            ),
            max_leaves=6,
        )
        sets = draw(st.lists(expressions, min_size=1, max_size=2))
        costs = draw(st.dictionaries(st.sampled_from(MODELS), st.integers(1, 3), max_size=2))
        return {"matrix": {"sets": {f"s{index}": text for index, text in enumerate(sets)}, "evict_costs": costs}}
    members = draw(st.permutations(MODELS))
    cuts = sorted(draw(st.lists(st.integers(0, 5), max_size=3)))
    flags = st.fixed_dictionaries({key: st.booleans() for key in ("swap", "exclusive", "persistent")})
    return {
        "groups": {
            f"g{start}": {"members": list(members[start:end]), **draw(flags)}
            for start, end in zip([0, *cuts], cuts, strict=False)
            if start < end
        }
    }


def build(config: dict[str, Any]) -> Residency:
    if "matrix" in config:
        return Residency([Sets(Matrix.read(config["matrix"]), MODELS)])
    groups = [Group(tuple(g["members"]), g["swap"], g["exclusive"], g["persistent"]) for g in config["groups"].values()]
    return Residency([Groups(groups, MODELS)])


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_a_model_is_admitted_where_loading_it_stops_nobody_who_holds(config: dict[str, Any]) -> None:
    rules, evicted = build(config), evictions(config)
    for held in SUBSETS:
        possible = all(rules.admits(held - {model}, model) for model in held)
        for model in set(MODELS) - held if possible else ():
            assert rules.admits(held, model) == (not evicted(model, held)), (held, model)


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_loading_stops_no_more_than_it_must(config: dict[str, Any]) -> None:
    rules, evicted = build(config), evictions(config)
    costs = config.get("matrix", {}).get("evict_costs", {})

    def price(models: set[str] | frozenset[str]) -> int:
        return sum(costs.get(model, 1) for model in models)

    for resident in SUBSETS:
        for model in set(MODELS) - resident:
            gone = resident - rules.after(resident, NOBODY, model)
            assert price(gone) == price(evicted(model, resident))
            assert rules.admits(resident - gone, model)


@settings(max_examples=50, deadline=None)
@given(configurations())
def test_hindrance_is_what_trying_every_part_of_the_holders_says(config: dict[str, Any]) -> None:
    rules = build(config)
    for held in SUBSETS:
        parts = [frozenset(part) for part in chain.from_iterable(combinations(held, n) for n in range(len(held) + 1))]
        for waiter in MODELS:
            for newcomer in set(MODELS) - {waiter}:
                tried = any(
                    rules.admits(part, waiter) and not rules.admits(part | {newcomer}, waiter)
                    for part in parts
                    if newcomer not in part and waiter not in part
                )
                if waiter not in held:
                    assert rules.hinders(held, waiter, newcomer) == tried, (held, waiter, newcomer)


@pytest.mark.parametrize("name", ["", "*"])
def test_a_ticket_that_names_no_model_excludes_nobody(name: str) -> None:
    rules = Residency([swapper("q | v")], matrix=matrix("q | voice"))
    assert together(rules, "q", name)
