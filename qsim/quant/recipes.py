"""Recipes with memory: how a scale follows from what was observed. Knows no schedule, no owner map, no centre's rule.

Every rule is branch-free over replicas: masks choose, so the bits of one replica never depend on another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import numpy as np

from qsim.arrays import F32, FLT_MAX, I64, Bool, frozen
from qsim.codec.means import Sums, merge_sums
from qsim.codec.scaled.recipes import ScaleRecipe
from qsim.errors import ProtocolViolation, UsageError
from qsim.formats import FloatFormat
from qsim.quant.identity import OpId, StateKey, TensorRole
from qsim.quant.state import Metadata, QuantObservation, QuantState, frozen_arrays

_TINY = float(np.finfo(np.float32).tiny)


class Timing(Enum):
    """Which tensor a scale is derived from."""

    CURRENT = "the tensor in hand"
    DELAYED = "tensors of earlier commits"


class AmaxChoice(Enum):
    """Which entry of the window speaks."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class ZeroRule(Enum):
    """What a commit does with an amax of 0. While the window speaks for 0, the scale is kept in either case."""

    SKIP = "the window does not move"  # TE's fused kernel
    ROLL = "a 0 enters the window"  # TE's unfused path


class NonFiniteRule(Enum):
    """What a commit does when NaN or Inf was observed."""

    LATCH = "Inf or NaN enters the window; the scale is kept while it is there"  # TE
    SKIP = "the commit changes nothing"
    FINITE = "the largest finite magnitude counts"


def scale_from_amax(amax: F32, *, otherwise: F32, fmt: FloatFormat, margin: int) -> F32:
    """RN(fmt.max * 2^-margin / amax), at most FLT_MAX; ``otherwise`` where amax is 0, Inf or NaN.

    float32 [lead]. Source: Transformer Engine's delayed-scaling update.
    """
    numerator = np.float32(math.ldexp(fmt.max, -margin))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        scale = np.minimum(numerator / amax, FLT_MAX)
        usable = (amax > 0) & np.isfinite(amax)
    return np.where(usable, scale, otherwise).astype(np.float32)


def descale_of(scale: F32) -> F32:
    """RN(1 / scale): the one place where a descale is computed."""
    return np.asarray(np.float32(1) / scale, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(ABC):
    """How scale and centre follow from observations.

    fmt: format of the codes; grad_fmt: of GRAD_OUTPUT tensors (None: the same). margin: bits of headroom.
    window: commits that a max looks back on, the newest included.
    """

    name: ClassVar[str]

    fmt: FloatFormat
    grad_fmt: FloatFormat | None = None
    window: int = 1
    margin: int = 0
    choice: AmaxChoice = AmaxChoice.MAX
    zero_rule: ZeroRule = ZeroRule.SKIP
    nonfinite_rule: NonFiniteRule = NonFiniteRule.LATCH
    initial_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window {self.window} is too short; an amax history needs at least 1 entry")
        if not _TINY <= self.initial_scale <= float(FLT_MAX):
            raise UsageError(f"initial_scale {self.initial_scale} is not a positive normal float32 number")
        for fmt in (self.fmt, self.grad_fmt or self.fmt):
            if not math.log2(_TINY) <= math.log2(fmt.max) - self.margin < 128:
                raise UsageError(
                    f"margin {self.margin} takes {fmt.name} max * 2^-margin out of float32; use a smaller one"
                )

    @property
    def timing(self) -> Timing:
        """CURRENT where begin needs the observation of the tensor in hand."""
        return Timing.DELAYED

    @property
    def centred(self) -> bool:
        """True where a centre is subtracted before encode."""
        return False

    @property
    def observes_next_center(self) -> bool:
        """True where an observation's amax is about ``center_after`` instead of the centre in force: two passes."""
        return False

    @property
    def observes_live_center(self) -> bool:
        """True where the tensor in hand is observed, before begin, about the live state's centre."""
        return False

    @property
    def center_block(self) -> int:
        """Columns that one value of a block centre serves; 0 where the centre is none of blocks."""
        return 0

    @property
    def block_recipe(self) -> ScaleRecipe | None:
        """How the residual's elements are encoded; None: with the one scale of the state."""
        return None

    def fmt_of(self, op: OpId) -> FloatFormat:
        """The format that ``op`` is encoded in."""
        if op.role_id == TensorRole.GRAD_OUTPUT and self.grad_fmt is not None:
            return self.grad_fmt
        return self.fmt

    def initial(self, owner: StateKey, lead: tuple[int, ...] = (), rest_ndim: int = 2) -> QuantState:
        """The state of an owner that has seen nothing: initial scale, empty window, epoch 0.

        lead: shape of the replica axes; rest_ndim: number of the tensor's other axes (a centre has as many).
        """
        scale = np.full(lead, self.initial_scale, np.float32)
        return QuantState(
            owner=owner,
            epoch=0,
            scale=frozen(scale),
            descale=frozen(descale_of(scale)),
            center=None,
            amax_history=frozen(np.zeros((*lead, self.window), np.float32)),
            last_commit=None,
        )

    def mean_axes(self, ndim: int, lead: int) -> tuple[int, ...] | None:
        """The axes that a centre is the mean over; None without a centre."""
        return None

    def center_after(self, held: Metadata | None, sums: Sums) -> F32:
        """The centre that a commit of ``sums`` alone would make of the one held."""
        raise AssertionError(f"recipe {self.name} has no centre")

    def begin(self, live: QuantState, observation: QuantObservation | None) -> QuantState:
        """The state that an operation encodes with: the live one, or one made from the tensor in hand."""
        return live

    @abstractmethod
    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """The next state: window rolled, scale and descale renewed, epoch + 1. Guards nothing."""

    def _roll(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """The next state without its centre: window rolled, scale and descale renewed, epoch + 1."""
        bad = is_bad(observation)
        entry = observation.amax
        if self.nonfinite_rule is NonFiniteRule.LATCH and bad.any():
            poison = np.where(observation.nan_count > 0, np.float32(np.nan), np.float32(np.inf))
            entry = np.where(bad, poison, entry).astype(np.float32)
        still = bad if self.nonfinite_rule is NonFiniteRule.SKIP else np.zeros_like(bad)
        if self.zero_rule is ZeroRule.SKIP:
            still = still | (entry == 0)
        keeps = bool(still.any())  # a shortcut, not a branch of the rule: np.where of no True is its other operand
        history = np.concatenate([live.amax_history[..., 1:], entry[..., None]], axis=-1)
        if keeps:
            history = np.where(still[..., None], live.amax_history, history)
        speaks = history.max(axis=-1) if self.choice is AmaxChoice.MAX else history[..., -1]
        scale = scale_from_amax(speaks, otherwise=live.scale, fmt=self.fmt_of(observation.op), margin=self.margin)
        if keeps:
            scale = np.where(still, live.scale, scale)
        return replace(
            live,
            epoch=live.epoch + 1,
            scale=frozen(scale),
            descale=frozen(descale_of(scale)),
            amax_history=frozen(history),
            last_commit=observation.op,
        )

    def _in_hand(self, observation: QuantObservation, *, bad: Bool) -> tuple[F32, F32]:
        """Scale and descale [lead] of the observed tensor itself; scale 1 where its amax is 0, and where ``bad``."""
        amax = np.where(bad, np.float32(np.nan), observation.amax).astype(np.float32)
        scale = scale_from_amax(amax, otherwise=np.ones_like(amax), fmt=self.fmt_of(observation.op), margin=self.margin)
        return frozen(scale), frozen(descale_of(scale))


def is_bad(observation: QuantObservation) -> Bool:
    """The replicas [lead] that held NaN or Inf."""
    return (observation.nan_count > 0) | (observation.inf_count > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling(Recipe):
    """Scale from the amax window of earlier commits. Source: Transformer Engine's DelayedScaling."""

    name: ClassVar[str] = "delayed"

    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """Roll the window, take its max (or newest entry), renew scale and descale."""
        return self._roll(live, observation)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentScaling(Recipe):
    """Scale from the tensor in hand; 1 where its amax is 0, Inf or NaN. A commit only keeps the record."""

    name: ClassVar[str] = "current"

    @property
    def timing(self) -> Timing:
        """CURRENT."""
        return Timing.CURRENT

    def begin(self, live: QuantState, observation: QuantObservation | None) -> QuantState:
        """The live state with scale and descale of the observation."""
        assert observation is not None, "the operation checks that current scaling has its observation"
        scale, descale = self._in_hand(observation, bad=is_bad(observation))
        return replace(live, scale=scale, descale=descale)

    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """Roll the window; scale and descale are those of the observation."""
        scale, descale = self._in_hand(observation, bad=is_bad(observation))
        return replace(self._roll(live, observation), scale=scale, descale=descale)


def merge_observations(observations: Sequence[QuantObservation], *, owner: StateKey | None = None) -> QuantObservation:
    """One observation of several (microbatches, workers, ranks): amax by max, means by their sums and counts.

    The order does not matter. ``op`` is the latest op. Raises UsageError for an empty sequence, and
    ProtocolViolation for an observation that ``owner``, where it is given, does not own.
    """
    if not observations:
        raise UsageError("no observation to merge; a commit needs at least one")
    for seen in observations:
        if owner is not None and not owner.owns(seen.op):
            raise ProtocolViolation(f"merge of a foreign observation: owner {owner}, {seen.op}; merge its own alone")
    if len(observations) == 1:
        return observations[0]
    sums = [o.mean for o in observations if o.mean is not None]
    return QuantObservation(
        op=max(o.op for o in observations),
        amax=frozen(np.asarray(np.maximum.reduce([o.amax for o in observations]))),
        mean=frozen_arrays(merge_sums(sums)) if sums else None,
        count=_total([o.count for o in observations]),
        nan_count=_total([o.nan_count for o in observations]),
        inf_count=_total([o.inf_count for o in observations]),
        about=observations[0].about if len({o.about for o in observations}) == 1 else None,
    )


def _total(counts: Sequence[I64]) -> I64:
    return frozen(np.asarray(np.add.reduce(counts), np.int64))
