# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Severity tour
#
# Three protocols over the activations that ship with qsim: the correct one, D01 (the GEMM reads the state after it
# advanced) and D03 (D01, and recompute advances the state again). Each is replayed with an amax history of 1 and of 16.
# Then a stale centre against a stale scale, for tensors with more and more mean.
#
# Every figure below is an error against the correct twin: the same tensors, the same seeds, the correct protocol.

# %%
import matplotlib.pyplot as plt
import numpy as np

from qsim.sim import broken
from qsim.sweep.config import load_study
from qsim.sweep.known import registries
from qsim.sweep.run import replay_cell

STUDY = """
schema = 1
grid = { defects = ["correct", "D01", "D03"], formats = ["e4m3"], recipes = ["delayed"], windows = [1, 16] }
replicas.count = 4
schedule.steps = 12
"""
cells = load_study(STUDY, registries()).cells()
outcomes = {(cell.defect, cell.window): replay_cell(cell) for cell in cells}

# %% [markdown]
# The verdict comes first. It is read from records (who encoded and decoded with which version), so it does not depend
# on the window. `replay` is the share of GEMMs whose recomputed output differs from the forward's in any bit: D01 shows
# nothing there, for both passes are wrong alike.

# %%
print(f"{'defect':8} {'window':>6} {'breaks':12} {'median':>8} {'p99':>8} {'replay':>7}")
for (defect, window), outcome in outcomes.items():
    r = outcome.record
    breaks = " ".join(sorted(broken(outcome.violations))) or "none"
    print(
        f"{defect:8} {window:6} {breaks:12} {r.rel_error_median:8.3f} {r.rel_error_p99:8.3f} {r.replay_mismatch:7.0%}"
    )


# %% [markdown]
# ## Error by step
#
# One line a pass: the error of the worst GEMM output of a step, median over the seeds. Step 0 starts cold (scale 1),
# so a live descale is off by orders of magnitude there. With a window of 16 the scale moves only where a new maximum
# enters; in the other steps the defect is there and costs nothing.
#
# With a window of 1 the recompute of D03 is milder than its forward: it encodes after one commit of this tensor and
# decodes after the second, and both scales come from the same amax. So it is a proper encode of the tensor with a scale
# of its own, which is another tensor than the forward's. With a window of 16 that holds up to step 7 only.


# %%
def by_step(outcome, phase):
    """Worst relative error over the GEMMs of a step, median over seeds."""
    return np.median(outcome.severity.by_step_and_layer(phase, "rel_error").max(axis=1), axis=1)


fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for ax, window in zip(axes, (1, 16), strict=True):
    for defect, color, width in (("D01", "#56B4E9", 5), ("D03", "#D55E00", 1.5)):
        outcome = outcomes[defect, window]
        ax.plot(by_step(outcome, "f"), color=color, linewidth=width, label=f"{defect} forward")
        ax.plot(by_step(outcome, "r"), color=color, linestyle="", marker="x", markersize=7, label=f"{defect} recompute")
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_ylim(bottom=0)
    ax.set_title(f"window {window}")
    ax.set_xlabel("step")
axes[0].set_ylabel("relative error (linear below 0.01)")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# The crosses of D01 lie on its line: forward and recompute are equal to the bit. With a window of 16 the forward of D03
# leaves that of D01 from step 9 on, and its recompute is no longer the milder one from step 8 on: two insertions a step
# fill a window of 16 after eight steps, so it looks back half as far.
#
# ## Stale centre, stale scale
#
# A torn decode of a mean-centred quantizer takes one half of its metadata from a later epoch. D07 takes the centre (an
# additive error), `stale_scale` the descale (a gain). `mean_shift` adds that many standard deviations to every
# activation, so k = |mean| / sigma is about that number. Shaped data, that is: not the capture alone.

# %%
CENTRE = """
schema = 1
grid.defects = ["D07", "stale_scale"]
grid.formats = ["e4m3"]
grid.recipes = ["centred"]
grid.windows = [1, 16]
grid.mean_shift = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
replicas.count = 3
schedule.steps = 8
schedule.layers = 2
measure.skip_steps = 2
"""
records = [(cell, replay_cell(cell).record) for cell in load_study(CENTRE, registries()).cells()]

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for ax, window in zip(axes, (1, 16), strict=True):
    for defect, name, color in (("D07", "stale centre", "#009E73"), ("stale_scale", "stale scale", "#CC79A7")):
        mine = [r for c, r in records if (c.defect, c.window) == (defect, window)]
        k = [r.k for r in mine]
        ax.plot(k, [r.rel_error_median for r in mine], color=color, marker="o", label=f"{name}, median")
        ax.plot(k, [r.rel_error_p99 for r in mine], color=color, marker="x", linestyle=":", label=f"{name}, p99")
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_ylim(bottom=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks([0.05, 0.5, 1, 2, 4, 8], ["0.05", "0.5", "1", "2", "4", "8"])
    ax.set_title(f"window {window}")
    ax.set_xlabel("k = |mean| / sigma")
axes[0].set_ylabel("relative error (linear below 0.01)")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# Neither is worse as such. With a window of 1 the median of the stale scale is the larger one at small k, that of the
# stale centre from k = 2 on; the p99s cross later, between k = 4 and 8. With a window of 16 the median of the stale scale
# is 0 throughout: its scale has moved in few steps, and its p99 is the larger one up to k = 2. The centre has no window,
# it moves with every commit.

# %%
print(f"{'defect':12} {'window':>6} {'k':>6} {'median':>8} {'p99':>8}")
for cell, r in records:
    print(f"{cell.defect:12} {cell.window:6} {r.k:6.2f} {r.rel_error_median:8.4f} {r.rel_error_p99:8.4f}")
