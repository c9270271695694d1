"""What a training run came to against its twin: plain values, one a seed, and their sums over seeds. Reads no log.

The unit of every interval is the seed. Steps of a run are not independent (weights, moments and histories carry over),
so no interval here takes a step for a trial: "any" is counted over seeds, and the share of steps is one number a seed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from qsim.severity.seeds import Bounds, Duel, Share, Spread, duel, order_statistic, resampled_mean, share, spread
from qsim.training.log import Row

NEVER = -1
"""``first_bad`` of a seed without a bad step."""
SPIKE = 3
"""A gradient norm above this many times the twin's median norm counts as a spike."""

Count = tuple[int, ...]
"""One whole number a seed."""
Flags = tuple[bool, ...]
"""One yes or no a seed."""


class PairedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of both runs, one entry a seed; ``twin_*`` is the correct run. Norms and losses as they were logged.

    nonfinite: the loss or the gradient norm is not finite.
    """

    step: int
    grad_norm: Row
    twin_norm: Row
    loss: Row
    twin_loss: Row
    skipped: Flags
    twin_skipped: Flags
    nonfinite: Flags
    twin_nonfinite: Flags


class OwnerDrift(msgspec.Struct, frozen=True, kw_only=True):
    """log2 (scale of the run / scale of the twin) of one owner at the end, a seed; inf where either is no number."""

    owner: str
    log2: Row


class OwnerCommits(msgspec.Struct, frozen=True, kw_only=True):
    """Commits of one owner over the whole run; expected: the correct twin's, 0 for an owner that it does not have."""

    owner: str
    actual: int
    expected: int


class ReplayStep(msgspec.Struct, frozen=True, kw_only=True):
    """One matched step: of so many points, how many differ in any bit between forward and recompute, a seed."""

    step: int
    points: int
    differing: Count


class Largest(NamedTuple):
    """The largest |log2| of a scale ratio, and whose it is; owner "" and NaN where no owner was compared."""

    log2: float
    owner: str
    seed: int


class TrainSeverity(msgspec.Struct, frozen=True, kw_only=True):
    """One run against its correct twin: plain values, one entry a seed; properties sum them up over seeds.

    skipped, nonfinite: number of steps. first_bad: the first step that is skipped, not finite, or a spike; NEVER for
    none. spike: largest gradient norm of the run over that of the twin; inf where the run's is not finite, 0 where only
    the twin's is not, NaN where neither is. above, above_twin: steps with a norm above SPIKE times the twin's median
    norm, those that are not finite included. norm_ratio, norm_ratio_p90: median and 90th percentile over steps of
    (norm / twin's norm of the same step) where both are finite; left_out: share of steps where they are not.
    final_gap: held-out loss minus the twin's, NaN where neither was taken. late_gap: mean training loss of the last
    quarter of the steps (one step at least) minus the twin's. In both gaps a loss that is no number is inf, and two of
    them are a tie: 0. unmatched: owners that one run has and the other has not; their scales are not compared.
    identical: the digests of both logs agree. tokens: of all steps; tokens_applied: of the steps not skipped.
    """

    seeds: tuple[int, ...]
    broken: tuple[str, ...]
    expected: tuple[str, ...]
    violations: int
    identical: Flags
    nonfinite: Count
    skipped: Count
    first_bad: Count
    norm_ratio: Row
    norm_ratio_p90: Row
    left_out: Row
    spike: Row
    above: Count
    above_twin: Count
    final_gap: Row
    late_gap: Row
    replay: tuple[ReplayStep, ...]
    drift: tuple[OwnerDrift, ...]
    unmatched: tuple[str, ...]
    commits: tuple[OwnerCommits, ...]
    tokens: int
    tokens_applied: Count
    steps: tuple[PairedStep, ...]

    @property
    def as_expected(self) -> bool:
        """True where the invariants broken are exactly those that the catalogue names."""
        return set(self.broken) == set(self.expected)

    @property
    def any_nonfinite(self) -> Share:
        """Seeds with a non-finite step."""
        return share([count > 0 for count in self.nonfinite])

    @property
    def any_skipped(self) -> Share:
        """Seeds with a skipped step."""
        return share([count > 0 for count in self.skipped])

    @property
    def skipped_share(self) -> Spread:
        """Share of the steps that is skipped, over seeds."""
        return spread([count / len(self.steps) for count in self.skipped])

    @property
    def skipped_mean(self) -> Bounds:
        """Percentile bootstrap over seeds of the share of all steps that is skipped (``resampled_mean``)."""
        low, high = resampled_mean(self.skipped)
        return Bounds(low / len(self.steps), high / len(self.steps))

    @property
    def first_bad_step(self) -> Spread:
        """Over seeds; a seed without one is inf."""
        return spread([math.inf if step == NEVER else step for step in self.first_bad])

    @property
    def log2_norm_ratio(self) -> Spread:
        """log2 of ``norm_ratio`` over seeds."""
        return spread([_log2(ratio) for ratio in self.norm_ratio])

    @property
    def replay_share(self) -> Row:
        """Share of matched steps in which any point differs, a seed; NaN where no step was matched."""
        if not self.replay:
            return (math.nan,) * len(self.seeds)
        differs = np.array([step.differing for step in self.replay]) > 0
        return tuple(float(n) / len(self.replay) for n in differs.sum(axis=0))

    @property
    def drift_median(self) -> float:
        """Median |log2| of the scale ratio over owners and seeds; NaN where no owner was compared."""
        return order_statistic([abs(value) for owner in self.drift for value in owner.log2], percent=50)

    @property
    def drift_largest(self) -> Largest:
        """The largest drift, the first of equals."""
        found = [
            Largest(value, owner.owner, seed)
            for owner in self.drift
            for value, seed in zip(owner.log2, self.seeds, strict=True)
        ]
        return max(found, key=lambda largest: abs(largest.log2), default=Largest(math.nan, "", NEVER))

    @property
    def worse(self) -> Duel:
        """Seeds in which the run ends with a higher held-out loss than its twin."""
        return duel(self.final_gap)

    @property
    def late_worse(self) -> Duel:
        """Seeds in which the late training loss is higher than the twin's."""
        return duel(self.late_gap)

    @property
    def applied(self) -> Count:
        """Steps whose update was applied."""
        return tuple(len(self.steps) - count for count in self.skipped)

    @property
    def commits_actual(self) -> int:
        """Commits of all owners."""
        return sum(owner.actual for owner in self.commits)

    @property
    def commits_expected(self) -> int:
        """Commits of all owners of the twin."""
        return sum(owner.expected for owner in self.commits)


def _log2(ratio: float) -> float:
    return -math.inf if ratio == 0 else math.log2(ratio)
