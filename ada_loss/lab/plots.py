"""The first name of `ada_loss.lab.results.figures`, which notebooks import."""

from ada_loss.lab.results.figures import (
    plot_depth,
    plot_rescue,
    plot_scales,
    plot_spacing,
    plot_underflow,
    plot_values,
)

__all__ = [
    "plot_depth",
    "plot_rescue",
    "plot_scales",
    "plot_spacing",
    "plot_underflow",
    "plot_values",
]
