"""Heat maps of an atlas: channels of the first, middle and last layer at early and late steps.

One row of pictures per layer and linear, one column per moment: the first and the last step of the
first and of the last block. Each pixel is a channel's abs max. Channels are laid out in reading
order, 128 to a row, which is what one FP8 scale covers: an outlier that spoils its group is a
bright pixel in a dark row. Colours are logarithmic and shared by all pictures of one linear.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from lacache_trt.accuracy.activations import Atlas
from lacache_trt.accuracy.models import FFN
from lacache_trt.output_file import check_picture_file
from lacache_trt.plugins.fp8 import GROUP

_LEAST = 1e-6


def draw(atlas: Atlas, path: Path) -> None:
    """Write the PNG; its errors are those of `check_picture_file`."""
    check_picture_file(path)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, moments = _linears(atlas), _moments(atlas)
    size = (3.2 * len(moments) + 1.4, 1.55 * len(names) + 1.0)
    figure, axes = pyplot.subplots(
        len(names), len(moments), figsize=size, squeeze=False, layout="constrained"
    )
    for row, name in enumerate(names):
        _draw_linear(figure, axes[row], atlas, name, moments)
    for column, step in enumerate(moments):
        block, within = atlas.steps[step]
        axes[0][column].set_title(f"block {block}, step {within}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel(f"channel within its group of {GROUP}", fontsize=8)
    figure.suptitle(
        f"{atlas.model}: abs max of each input channel (rows: the groups that share an FP8 scale)",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_linear(figure: Any, axes: Any, atlas: Atlas, name: str, moments: list[int]) -> None:
    """One linear at every moment, on one colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    values = np.maximum(atlas.amax[name][moments], _LEAST)
    scale = LogNorm(float(values.min()), max(float(values.max()), 2 * float(values.min())))
    image = None
    for axis, moment in zip(axes, values, strict=True):
        image = axis.imshow(
            _grid(moment), norm=scale, cmap="inferno", aspect="auto", interpolation="nearest"
        )
        axis.tick_params(labelsize=7)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    layer, kind = name.split(".")[1:]
    axes[0].set_ylabel(f"layer {layer}\n{kind.replace('_', '-')}\ngroup", fontsize=8)
    bar = figure.colorbar(image, ax=list(axes), pad=0.01)
    bar.ax.tick_params(which="both", labelsize=7)


def _grid(channels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Channels [K] as [ceil(K / 128), 128]; what is missing in the last group stays blank."""
    groups = -(-len(channels) // GROUP)
    grid = np.full(groups * GROUP, np.nan, np.float32)
    grid[: len(channels)] = channels
    return grid.reshape(groups, GROUP)


def _linears(atlas: Atlas) -> list[str]:
    """Both linears of the first, the middle and the last layer."""
    layers = sorted({int(name.split(".")[1]) for name in atlas.amax})
    chosen = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    return [f"layers.{layer}.{kind}" for layer in chosen for kind in FFN]


def _moments(atlas: Atlas) -> list[int]:
    """Places in `steps` of the first and the last step of the first and of the last block."""
    blocks = sorted({block for block, _ in atlas.steps})
    found = []
    for block in sorted({blocks[0], blocks[-1]}):
        places = [place for place, step in enumerate(atlas.steps) if step[0] == block]
        found += sorted({places[0], places[-1]})
    return found
