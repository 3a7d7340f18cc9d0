"""A profile as a picture, through matplotlib (the `plot` extra).

Knows: panels, axes, file formats. Does not know: how anything was measured.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import SpecgenError, UsageError
from specgen.measure.workloads import HARD_KIND

if TYPE_CHECKING:
    from specgen.measure.profile import Point, Profile

FORMATS = ("png", "svg")


def plot_format(path: str) -> str:
    """png or svg, by the name of the file. UsageError for anything else; SpecgenError when matplotlib is missing."""
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        raise UsageError(f"--plot {path!r} is neither a .png nor a .svg file", hint="for example --plot profile.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SpecgenError("--plot needs matplotlib", hint="pip install 'specgen[plot]'") from None
    return suffix


def draw(profile: Profile, title: str, form: str) -> bytes:
    """The picture's file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(title)
    _steps(axes[0][0], profile)
    _survival(axes[0][1], profile)
    _speeds(axes[1][0], profile.points)
    _cycles(axes[1][1], profile)
    data = io.BytesIO()
    figure.savefig(data, format=form, dpi=120)
    return data.getvalue()


def _steps(axis: Any, profile: Profile) -> None:
    for context, table in profile.steps.items():
        rows = sorted(table)
        middle = [table[r].middle for r in rows]
        (line,) = axis.plot(rows, middle, marker="o", markersize=3, label=f"{context} tokens of context")
        low, high = [table[r].low for r in rows], [table[r].high for r in rows]
        axis.fill_between(rows, low, high, alpha=0.2, color=line.get_color())
    axis.set(title="A step of R rows (median, quartiles)", xlabel="rows R", ylabel="t(R), ms")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


def _survival(axis: Any, profile: Profile) -> None:
    for survival, style in ((profile.survival, "-"), (profile.draft_survival, ":")):
        for number, (kind, shares) in enumerate(survival.items()):
            if shares:
                name = kind if style == "-" else f"{kind}, draft model"
                look = {"linestyle": style, "color": f"C{number % 10}", "marker": "o", "markersize": 3}
                axis.plot(range(1, len(shares) + 1), shares, label=name, **look)
    if axis.lines:
        axis.legend(fontsize="small")
    axis.set(title="Survival of drafts", xlabel="position k in the draft", ylabel="share accepted up to k")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)


def _speeds(axis: Any, points: Sequence[Point]) -> None:
    """Over γ, one line for each proposer that was measured (or the first); the hard kind beside all."""
    fixed = [p for p in points if p.setting.gamma is not None and p.setting.tree == 1]
    drafts = [p for p in fixed if not p.setting.is_plain]
    names = list(dict.fromkeys(_line_name(p) for p in drafts if p.measured)) or [_line_name(p) for p in drafts[:1]]
    for name in names:
        line = [p for p in fixed if p.setting.is_plain or _line_name(p) == name]
        line.sort(key=lambda p: p.setting.gamma or 0)
        gammas = [p.setting.gamma for p in line]
        axis.plot(gammas, [p.predicted_speedup for p in line], linestyle="--", label=f"{name}, predicted")
        hard = [p.predicted_by_kind.get(HARD_KIND) for p in line]
        if None not in hard:
            axis.plot(gammas, hard, linestyle=":", label=f"{name}, {HARD_KIND} alone, predicted")
        _measured(axis, [p for p in line if p.measured is not None], name)
    for point in points:
        if point.setting.gamma is None and point.measured is not None:
            name = f"{point.setting.label}, measured"
            axis.axhline(point.measured.middle, color="black", linewidth=0.8, linestyle="-.", label=name)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set(title="Speed over plain decoding, all kinds", xlabel="γ", ylabel="times plain")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _line_name(point: Point) -> str:
    """The setting without its γ."""
    return point.setting.label.rsplit(" γ", 1)[0]


def _measured(axis: Any, points: Sequence[Point], name: str) -> None:
    known = [(p.setting.gamma, p.measured) for p in points if p.measured is not None]
    if not known:
        return
    middle = [m.middle for _, m in known]
    below = [m.middle - m.low if m.low > 0 else 0.0 for _, m in known]
    above = [m.high - m.middle if m.high < float("inf") else 0.0 for _, m in known]
    gammas = [gamma for gamma, _ in known]
    axis.errorbar(gammas, middle, yerr=[below, above], fmt="o", capsize=3, label=f"{name}, measured")


def _cycles(axis: Any, profile: Profile) -> None:
    shown = [parts for parts in profile.cycles if parts.measured] or profile.cycles
    labels = [parts.label for parts in shown]
    left = [0.0] * len(shown)
    for name in ("propose", "verify", "reconcile", "other"):
        widths = [getattr(parts, f"{name}_ms") for parts in shown]
        axis.barh(labels, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(title="Where a cycle's time goes", xlabel="ms")
    axis.legend(fontsize="small")
