"""`llama-lease check`: what a configuration means, in words and tables."""

from collections.abc import Iterable, Sequence

from proxy import forward, models
from proxy.classify import Classifier, Plan, is_pattern, normalise
from proxy.config import Config
from proxy.errors import ProxyError
from proxy.forward import Upstream
from proxy.rooms import residency_of
from proxy.runtime import check_commands, create_backends


def explain(config: Config, model: str, path: str) -> str:
    """How one request would be classified, and why. Raises ProxyError as the request would."""
    path = normalise(path)
    for verb in ("POST", "GET"):
        plan = Classifier(config).plan(verb, path, model)
        if plan.mode is not None:
            break
    return "\n".join(
        [
            f"{verb} {path} with model '{model}'",
            f"  because   {plan.why}",
            f"  model     {plan.model or '-'}",
            f"  group     {plan.group or '-'}",
            f"  mode      {_mode(plan)}",
            f"  place     {_place(config, plan)}",
        ]
    )


async def overview(config: Config) -> str:
    """Every model that can be found, in the configuration and at upstreams that answer: group, mode, place."""
    create_backends(config)  # its faults are the configuration's, too
    check_commands(config)
    classifier = Classifier(config)
    found: dict[str, str] = {model: "configured" for model, _, _ in classifier.models()}
    notes = []
    async with forward.session() as client:
        for name, section in config.upstreams.items():
            listed, down = await models.merged({name: Upstream(name, section, client, lambda _: None)}, (), {})
            if down:
                notes.append(f"upstream '{name}' does not answer at {section.url}: its own models are not listed")
            for model in listed["data"]:
                found.setdefault(model["id"], f"listed by {name}")
    rows = [("MODEL", "GROUP", "MODE", "PLACE", "FOUND")]
    for model, origin in sorted(found.items()):
        try:
            plan = classifier.plan("POST", "/v1/chat/completions", model)
        except ProxyError as error:
            rows.append((model, "-", "-", f"refused: {error.status}", origin))
            continue
        rows.append((model, plan.group, _mode(plan), _place(config, plan), origin))
    for alias, model in sorted(config.aliases.items()):
        rows.append((alias, "", "", f"alias of {model}", "configured"))
    patterns = [
        f"models like {model}: group {name}, {group.mode}"
        for name, group in config.groups.items()
        for model in group.models
        if is_pattern(model)
    ]
    rules = [
        f"lease {lease}: {line}"
        for lease in config.leases
        if (residency := residency_of(config, lease)) is not None
        for line in residency.words()
    ]
    default = f"other models: group {config.default_group}" if config.default_group else "other models: 404"
    return "\n".join([f"{config.path} is valid.", "", *_table(rows), "", *patterns, default, *rules, *notes])


def _mode(plan: Plan) -> str:
    return str(plan.mode) if plan.mode is not None else "no lease"


def _place(config: Config, plan: Plan) -> str:
    if plan.backend is not None:
        section = config.backends[plan.backend]
        return f"backend {plan.backend} ({section.kind}, lease {section.lease})"
    if plan.upstream is None:
        return "-"
    upstream = config.upstreams[plan.upstream]
    return f"upstream {plan.upstream} ({upstream.url}, lease {upstream.lease})"


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
