"""The accuracy-versus-speed frontier of a grid, as a PNG.

One point per case: forwards per answer to the right, right answers upwards; colours tell policies
apart, shapes caches, hollow points have suffix dropout. The line joins the cases that no other
one beats on both counts; the ring is the case that was chosen.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

from lacache_trt.output_file import check_picture_file
from lacache_trt.policy_grid import BASE, CaseResult, GridReport

_SHAPES = {"none": "s", "exact": "o", "prefix": "^", "dual": "D"}


def draw(report: GridReport, path: Path) -> None:
    """Write the PNG; its errors are those of `check_picture_file`."""
    check_picture_file(path)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    policies = sorted({_setting(one, "policy") for one in report.cases})
    colours = {name: f"C{index}" for index, name in enumerate(policies)}
    for one in report.cases:
        colour = colours[_setting(one, "policy")]
        hollow = _setting(one, "suffix") == "dpad"
        axes.scatter(
            one.forwards,
            100 * one.accuracy,
            marker=_SHAPES[_setting(one, "cache")],
            facecolors="none" if hollow else colour,
            edgecolors=colour,
            s=36,
        )
    best = [one for one in report.cases if one.on_frontier]
    axes.plot([one.forwards for one in best], [100 * one.accuracy for one in best], "k-", lw=0.8)
    chosen = next(one for one in report.cases if one.name == report.held_out.chosen)
    axes.scatter(chosen.forwards, 100 * chosen.accuracy, s=160, facecolors="none", edgecolors="k")
    for name, colour in colours.items():
        axes.scatter([], [], color=colour, label=name)
    for name in sorted({_setting(one, "cache") for one in report.cases}):
        axes.scatter([], [], color="grey", marker=_SHAPES[name], label=f"cache {name}")
    if any(_setting(one, "suffix") == "dpad" for one in report.cases):
        axes.scatter([], [], facecolors="none", edgecolors="grey", label="hollow: DPad")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("forwards per answer, up to its end token")
    axes.set_ylabel("right answers, %")
    problems = report.workload["problems"]
    axes.set_title(f"tiny-llada, {problems} problems of the tune split; ring: the chosen setting")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _setting(one: CaseResult, name: str) -> str:
    return str(one.settings.get(name, getattr(BASE, name)))
