"""The picture that README opens with: who had the GPU and who waited, alone and behind llama-lease."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench._scenarios import KINDS, Played

_COLOURS = {"chat": "#5b8db8", "vision": "#c98b2b", "speech": "#b5443c"}


def draw(runs: Mapping[str, Played], path: Path) -> None:
    """One panel a run on one time axis; each request is a line: pale while it waits, full while it is served."""
    figure = Figure(figsize=(9, 2.6 * len(runs) + 0.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, run) in zip(panels, runs.items(), strict=True):
        _panel(axes, title, run)
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(left=0)
    kinds = [
        kind for kind in _COLOURS if any(KINDS.get(o.arrival.model) == kind for r in runs.values() for o in r.outcomes)
    ]
    marks = [Patch(color=_COLOURS[kind], label=f"{kind}: has the GPU") for kind in kinds]
    marks += [Patch(color=_COLOURS[kind], alpha=0.25, label=f"{kind}: waits") for kind in kinds]
    marks.append(Patch(color="#dddddd", label="a model is loading"))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8, frameon=False)
    with mpl.rc_context({"svg.hashsalt": "llama-lease", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, title: str, run: Played) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    for began, ready, _ in run.loads:
        axes.axvspan(began, ready, color="#dddddd", linewidth=0, zorder=0)
    for row, outcome in enumerate(sorted(run.outcomes, key=lambda o: o.sent)):
        kind = KINDS.get(outcome.arrival.model, "chat")
        colour, height = _COLOURS[kind], 1.0 if kind == "chat" else 2.4
        axes.barh(row, outcome.wait, height, outcome.sent, color=colour, alpha=0.25, linewidth=0)
        axes.barh(row, outcome.ended - outcome.served, height, outcome.served, color=colour, linewidth=0)
        if kind != "chat":
            words = f"{kind} waited {outcome.wait:.1f} s"
            axes.annotate(words, (outcome.ended, row), (4, 0), "data", "offset points", fontsize=8, va="center")
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_ylabel("requests, oldest first", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
