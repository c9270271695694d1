"""A picture of what makes the gradients spike, and of what does not. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from qsim.report.pictures import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qsim.training.mechanism import RowSums

_LOOK = (("#0072B2", "-", "o"), ("#D55E00", "-", "s"), ("#009E73", "--", "^"))
"""Colours of Okabe and Ito: apart for every eye."""


def mechanism_figure(found: Mapping[str, RowSums]) -> Figure:
    """Above: largest row sum of the recomputed probabilities, over layers; below: gradient norm. A line a run, seed 0.

    What is not finite is drawn at the upper edge, with an open marker.
    """
    fig = blank((7.2, 5.4), what="the mechanism", layout="constrained")
    from matplotlib.ticker import MaxNLocator  # there: the figure was made by it

    above, below = fig.subplots(2, 1, sharex=True)
    for (name, one), (colour, line, marker) in zip(found.items(), _LOOK, strict=True):
        steps = [step.step for step in one.log.steps]
        sums = one.largest[:, :, 0].max(axis=1)
        norms = np.array([step.grad_norm[0] for step in one.log.steps])
        for ax, values in ((above, sums), (below, norms)):
            finite = np.isfinite(values)
            ax.plot(
                steps, np.where(finite, values, np.nan), line, color=colour, marker=marker, ms=3.5, lw=1.2, label=name
            )
            if not finite.all():
                top = np.asarray(steps)[~finite]
                ax.plot(top, np.ones(len(top)), marker, mfc="none", color=colour, transform=ax.get_xaxis_transform())
    for ax, what in ((above, "largest row sum of P"), (below, "gradient norm")):
        ax.set_yscale("log")
        ax.set_ylabel(what, fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(visible=True, which="major", alpha=0.3)
    below.set_xlabel("step", fontsize=9)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.legend(fontsize=8, loc="upper right")
    above.set_title(
        "P = exp(S recomputed - LSE saved): a row adds up to 1 where the two are of the same logits", fontsize=9
    )
    return fig
