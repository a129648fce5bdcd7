"""Writes llama-lease.json, the dashboard: `python -m grafana.build`. A test compares it with the committed file."""

import itertools
import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.panels import Look, Panel, rows

HEIGHTS: dict[Look, int] = {"stat": 4}
HEIGHT = 8


def source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def build() -> str:
    """The dashboard as JSON text, the same for the same panels."""
    board = (
        dashboard.Dashboard("llama-lease")
        .uid("llama-lease")
        .description("Who waits for the GPU, who has it, and what it costs.")
        .tags(["llama-lease"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("instance", "Instance", "llama_lease_build_info"))
        .with_variable(variable("lease", "Lease", 'llama_lease_lease_max_hold_seconds{instance=~"$instance"}'))
        .with_variable(variable("group", "Group", 'llama_lease_leases_active{instance=~"$instance", lease=~"$lease"}'))
        .annotation(reload_mark("Reload accepted", "success", "blue"))
        .annotation(reload_mark("Reload refused", "failure", "red"))
    )
    ids = itertools.count(1)  # links to a panel name it by its number
    for title, panels in rows():
        board = board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            board = board.with_panel(view(panel, next(ids)))
    return json.dumps(board.build(), cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


def variable(name: str, label: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(source())
        .query({"query": f"label_values({metric}, {name})", "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def reload_mark(name: str, result: str, color: str) -> dashboard.AnnotationQuery:
    reloads = f'llama_lease_config_reloads_total{{instance=~"$instance", result="{result}"}}'
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(source())
        .enable(True)
        .icon_color(color)
        .expr(f"increase({reloads}[1m]) > 0")
    )


def view(panel: Panel, number: int) -> Builder[models.Panel]:
    """The panel in Grafana's own terms."""
    view = empty(panel).id(number).title(panel.title).description(panel.text).datasource(source())
    view = view.height(HEIGHTS.get(panel.look, HEIGHT)).span(panel.width)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).range()
        view = view.with_target(target.format(form(panel.look)))
    return view


def empty(panel: Panel) -> heatmap.Panel | statetimeline.Panel | stat.Panel | timeseries.Panel:
    match panel.look:
        case "heatmap":
            color = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
            color = color.fill("dark-orange").exponent(0.5)
            axis = heatmap.YAxisConfig().unit(panel.unit)
            return heatmap.Panel().calculate(False).color(color).y_axis(axis).show_tooltip()
        case "timeline":
            idle = models.ValueMappingResult(text=" ", color="transparent")
            return (
                statetimeline.Panel()
                .show_value(shapes.VisibilityMode.NEVER)
                .merge_values(True)
                .mappings([models.ValueMap(options={"0": idle})])
                .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
                .thresholds(steps(None))
            )
        case "stat":
            last = common.ReduceDataOptions().calcs(["lastNotNull"])
            view = stat.Panel().unit(panel.unit).thresholds(steps(panel.red)).reduce_options(last)
            return view.text_mode(stat_text(panel))
        case "lines" | "stacked" | "percent" | "bars":
            return series(panel)


def form(look: Look) -> PromQueryFormat:
    return PromQueryFormat.HEATMAP if look == "heatmap" else PromQueryFormat.TIME_SERIES


def stat_text(panel: Panel) -> shapes.BigValueTextMode:
    named = any(query.legend for query in panel.queries)
    return shapes.BigValueTextMode.NAME if named else shapes.BigValueTextMode.VALUE


def steps(red: float | None) -> dashboard.ThresholdsConfig:
    limits = [models.Threshold(value=None, color="green")]
    if red is not None:
        limits.append(models.Threshold(value=red, color="red"))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(limits)


def series(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(shapes.LegendDisplayMode.LIST)
        .placement(shapes.LegendPlacement.BOTTOM)
    )
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING)
    view = timeseries.Panel().unit(panel.unit).min(0).legend(legend).tooltip(tooltip)
    match panel.look:
        case "stacked" | "percent":
            stacking = common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A")
            view = view.stacking(stacking).fill_opacity(40).line_width(1)
        case "bars":
            view = view.draw_style(shapes.GraphDrawStyle.BARS).fill_opacity(60)
        case _:
            view = view.fill_opacity(5).line_width(2)
    return view.max(1) if panel.unit == "percentunit" else view


if __name__ == "__main__":
    Path(__file__).with_name("llama-lease.json").write_text(build())
