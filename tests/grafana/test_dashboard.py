from collections import Counter
from typing import Any

import pytest

from grafana.build import build
from tests.grafana.promql import GRAFANA, dashboard, exported, load, names, panel_queries, recorded


def test_the_committed_dashboard_is_what_the_program_builds() -> None:
    assert (GRAFANA / "llama-lease.json").read_text() == build(), "run: python -m grafana.build"


def test_no_query_names_a_metric_that_is_not_exported() -> None:
    asked = {title: names(expr) for title, expr, _ in panel_queries()}
    assert {title: missing for title, used in asked.items() if (missing := used - exported() - recorded())} == {}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            'sum by (le, mode) (rate(a_bucket{x="y z", m!~"b"}[5m])) / on (c) group_left (d) e:f > 0',
            {"a_bucket", "e:f"},
        ),
        ("histogram_quantile(0.5, x) and y unless z", {"x", "y", "z"}),
        ('count(x{y="a{b} c[d]"}) or vector(1)', {"x"}),
    ],
)
def test_names_of_a_query(query: str, expected: set[str]) -> None:
    assert names(query) == expected


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_every_panel_says_what_it_shows_and_has_a_query_and_a_unit() -> None:
    for panel in panels():
        assert panel["title"], panel
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        if panel["type"] in ("timeseries", "stat"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_titles_are_unique() -> None:
    assert [title for title, count in Counter(panel["title"] for panel in panels()).items() if count > 1] == []


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert max(taken.values()) == 1


def test_variables_choose_instance_lease_and_group() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "lease", "group"]
    for name in ("instance", "lease", "group"):
        query = variables[name]["query"]["query"]
        metric = query.removeprefix("label_values(").split("{")[0].split(",")[0]
        assert metric in exported()
        assert variables[name]["allValue"] == ".*"


def test_every_query_listens_to_the_variables() -> None:
    for title, expr, _ in panel_queries():
        assert 'instance=~"$instance"' in expr, title


def test_provisioning_and_compose_agree_with_the_files() -> None:
    source = load("provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]

    services = load("compose.yaml")["services"]
    assert set(services) == {"prometheus", "grafana"}
    mounted: dict[str, str] = {}
    for service in services.values():
        for volume in service["volumes"]:
            here, there = volume.split(":")[:2]
            if here.startswith("."):
                assert (GRAFANA / here).exists(), volume
                mounted[there] = here
    flags = services["prometheus"]["command"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in flags
    assert "--config.file=/etc/prometheus/prometheus.yml" in flags
    for rule_file in load("prometheus.yml")["rule_files"]:
        assert mounted[f"/etc/prometheus/{rule_file}"] == f"./{rule_file}"
    folder = load("provisioning/dashboards/llama-lease.yml")["providers"][0]["options"]["path"]
    assert mounted[f"{folder}/llama-lease.json"] == "./llama-lease.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(folder)
    assert mounted["/etc/grafana/provisioning"] == "./provisioning"
