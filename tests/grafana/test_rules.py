import subprocess

from tests.grafana.promql import GRAFANA, exported, installed, load, names, recorded, rules


def promtool(*arguments: str) -> None:
    done = subprocess.run([installed("promtool"), *arguments], cwd=GRAFANA, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_and_does_not_fire_as_its_stories_say() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_each_alert_has_a_story_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    told: dict[str, set[bool]] = {}
    for story in load("alerts_test.yml")["tests"]:
        for moment in story.get("alert_rule_test", ()):
            told.setdefault(moment["alertname"], set()).add(bool(moment["exp_alerts"]))
    assert told == {rule["alert"]: {True, False} for rule in rules("alerts.yml")}


def test_prometheus_accepts_its_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")


def test_no_rule_names_a_metric_that_is_not_exported() -> None:
    asked = {rule.get("alert") or rule["record"]: names(rule["expr"]) for rule in rules("alerts.yml", "recording.yml")}
    known = exported() | recorded() | {"up"}
    assert {rule: missing for rule, used in asked.items() if (missing := used - known)} == {}


def test_each_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
