"""Recipes with memory: how a scale follows from what was observed. Knows no schedule, no owner map, no centre's rule.

Every rule is branch-free over replicas: masks choose, so the bits of one replica never depend on another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from qsim.arrays import F32, FLT_MAX, Bool, frozen
from qsim.codec.means import Sums
from qsim.codec.scaled.recipes import ScaleRecipe
from qsim.errors import UsageError
from qsim.formats import FloatFormat
from qsim.quant.at_once import roll_at_once, scale_at_once
from qsim.quant.identity import OpId, StateKey, TensorRole
from qsim.quant.merging import merge_observations, written_amax
from qsim.quant.rules import (
    TORCHAO_EPS,
    AmaxChoice,
    Fallback,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    ScaleGrid,
    Timing,
    WindowRule,
    ZeroRule,
    descale_of,
    scale_from_amax,
)
from qsim.quant.state import Metadata, QuantObservation, QuantState

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(ABC):
    """How scale and centre follow from observations.

    fmt: format of the codes; grad_fmt: of GRAD_OUTPUT tensors (None: the same). margin: bits of headroom.
    window: commits that a max looks back on (``window_rule`` says whether the newest is one of them when a commit
    stores a scale). eps: the least amax under ZeroRule.CLAMP. amax_bound, decay: what MergeRule.CLIP and DECAY need,
    and no other rule has. initial_rule, initial_scale: the scale of the first operations. ``qsim.quant.rules`` has
    the members of each axis and who does it so.

    A DECAY entry follows from the newest entry of the window, so an Inf or NaN that is latched there never leaves.
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
    window_rule: WindowRule = WindowRule.INCLUDED
    merge_rule: MergeRule = MergeRule.MAX
    initial_rule: InitialScale = InitialScale.GIVEN
    grid: ScaleGrid = ScaleGrid.FLOAT32
    eps: float = TORCHAO_EPS
    amax_bound: float | None = None
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window {self.window} is too short; an amax history needs at least 1 entry")
        if not _TINY <= self.initial_scale <= float(FLT_MAX):
            raise UsageError(f"initial_scale {self.initial_scale} is not a positive normal float32 number")
        if not _TINY <= self.eps <= float(FLT_MAX):
            raise UsageError(f"eps {self.eps}, the least amax, is not a positive normal float32 number")
        _check_merge(self.merge_rule, amax_bound=self.amax_bound, decay=self.decay)
        for fmt in (self.fmt, self.grad_fmt or self.fmt):
            if not math.log2(_TINY) <= math.log2(fmt.max) - self.margin < 128:
                raise UsageError(
                    f"margin {self.margin} takes {fmt.name} max * 2^-margin out of float32; use a smaller one"
                )

    @property
    def timing(self) -> Timing:
        """CURRENT where begin needs the observation of the tensor in hand."""
        return Timing.DELAYED

    def begins_from_data(self, live: QuantState) -> bool:
        """True while the initial scale of ``live`` is of the tensor in hand."""
        match self.initial_rule:
            case InitialScale.GIVEN:
                return False
            case InitialScale.FROM_DATA:
                return live.epoch == 0
            case InitialScale.WARM_UP:
                return live.epoch < self.window

    def needs_observation(self, live: QuantState) -> bool:
        """True where begin needs the observation of the tensor in hand."""
        return self.timing is Timing.CURRENT or self.begins_from_data(live)

    @property
    def may_need_observation(self) -> bool:
        """True where some begin needs the observation of the tensor in hand."""
        return self.timing is Timing.CURRENT or self.initial_rule is not InitialScale.GIVEN

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

    def merge(self, observations: Sequence[QuantObservation], *, owner: StateKey | None = None) -> QuantObservation:
        """One observation of a unit's, by ``merge_rule``."""
        return merge_observations(observations, owner=owner, rule=self.merge_rule)

    def begin(self, live: QuantState, observation: QuantObservation | None, *, op: OpId) -> QuantState:
        """The state that ``op`` encodes with: the live one, or one made from it and the tensor in hand."""
        return self._before_use(live, observation, op)

    @abstractmethod
    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """The next state: window rolled, scale and descale renewed, epoch + 1. Guards nothing."""

    def _before_use(self, live: QuantState, observation: QuantObservation | None, op: OpId) -> QuantState:
        """``live`` with the scale that a use of it computes: of the window before it, or of the tensor in hand."""
        scale = live.scale
        if self.window_rule is WindowRule.EXCLUDED:
            scale = self._scale_of(self._speaks(live.amax_history), otherwise=scale, op=op)
        if self.begins_from_data(live):
            if observation is None:
                raise UsageError(
                    f"recipe {self.name} with initial_rule {self.initial_rule.name} takes the scale of epoch "
                    f"{live.epoch} from the tensor in hand: owner {live.owner}, {op}; begin with its observation"
                )
            finite = self.nonfinite_rule is NonFiniteRule.FINITE
            amax = observation.amax if finite else written_amax(observation)
            scale = self._scale_of(amax, otherwise=scale, op=op)
        if scale is live.scale:
            return live
        return replace(live, scale=frozen(scale), descale=frozen(descale_of(scale)))

    def _roll(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """The next state without its centre: window rolled, scale and descale renewed, epoch + 1."""
        history, scale, descale = roll_at_once(self, live, observation) or self._roll_by_masks(live, observation)
        return QuantState(
            owner=live.owner,
            epoch=live.epoch + 1,
            scale=frozen(scale),
            descale=frozen(descale),
            center=live.center,
            amax_history=frozen(history),
            last_commit=observation.op,
            center_seen=live.center_seen,
            center_block=live.center_block,
        )

    def _roll_by_masks(self, live: QuantState, observation: QuantObservation) -> tuple[F32, F32, F32]:
        """Window, scale and descale after a commit: the definition, for every rule."""
        entry = self._entry(live, observation)
        still = entry == 0 if self.zero_rule is ZeroRule.SKIP else np.zeros_like(entry, np.bool_)
        if self.nonfinite_rule is NonFiniteRule.SKIP:
            still = still | ~np.isfinite(entry)
        keeps = bool(still.any())  # a shortcut, not a branch of the rule: np.where of no True is its other operand
        history = np.concatenate([live.amax_history[..., 1:], entry[..., None]], axis=-1)
        if keeps:
            history = np.where(still[..., None], live.amax_history, history)
        used = self._before_use(live, observation, observation.op).scale
        if self.window_rule is WindowRule.EXCLUDED:
            scale = used
        else:
            scale = self._scale_of(self._speaks(history), otherwise=used, op=observation.op)
        if self.nonfinite_rule is NonFiniteRule.INVERT:
            still = still | ~np.isfinite(entry)
            keeps = True
        if keeps:
            scale = np.where(still, used, scale)
        return history, scale, descale_of(scale)

    def _entry(self, live: QuantState, observation: QuantObservation) -> F32:
        """What would enter the window [lead]; with the NaN and Inf in it, unless the rule is FINITE."""
        seen = written_amax(observation)
        finite = observation.amax
        if self.amax_bound is not None:
            bound = np.float32(self.amax_bound)
            seen, finite = np.minimum(seen, bound), np.minimum(finite, bound)
        if self.decay is not None:
            with np.errstate(under="ignore"):
                held = np.float32(self.decay) * live.amax_history[..., -1]
            seen, finite = np.maximum(seen, held), np.maximum(finite, held)
        return finite if self.nonfinite_rule is NonFiniteRule.FINITE else seen

    def _speaks(self, history: F32) -> F32:
        """The amax [lead] that speaks for a window; NaN wins."""
        newest: F32 = history[..., -1]
        return np.asarray(history.max(axis=-1)) if self.choice is AmaxChoice.MAX else newest

    def _scale_of(self, amax: F32, *, otherwise: F32, op: OpId) -> F32:
        """The scale [lead] of an amax that speaks."""
        return scale_from_amax(
            amax,
            otherwise=otherwise,
            fmt=self.fmt_of(op),
            margin=self.margin,
            grid=self.grid,
            nonfinite_rule=self.nonfinite_rule,
            at_least=self.eps if self.zero_rule is ZeroRule.CLAMP else 0.0,
        )

    def _in_hand(self, observation: QuantObservation, *, bad: Bool, otherwise: F32) -> tuple[F32, F32]:
        """Scale and descale [lead] of the observed tensor itself; ``bad``: the replicas in which it does not count."""
        poison = np.where(np.isnan(written_amax(observation)), np.float32(np.nan), np.float32(np.inf))
        amax = np.where(bad, poison, observation.amax).astype(np.float32)
        scale = self._scale_of(amax, otherwise=otherwise, op=observation.op)
        return scale, descale_of(scale)


def _check_merge(rule: MergeRule, *, amax_bound: float | None, decay: float | None) -> None:
    for owner, name, value in ((MergeRule.CLIP, "amax_bound", amax_bound), (MergeRule.DECAY, "decay", decay)):
        if (rule is owner) != (value is not None):
            mend = f"give {name}" if value is None else f"leave {name} out"
            raise UsageError(f"merge_rule {rule.name} with {name} {value}; {name} belongs to {owner.name}: {mend}")
    if amax_bound is not None and not _TINY <= amax_bound <= float(FLT_MAX):
        raise UsageError(f"amax_bound {amax_bound} is not a positive normal float32 number")
    if decay is not None and not 0 < decay <= 1:
        raise UsageError(f"decay {decay} of an amax is not in 0 < decay <= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling(Recipe):
    """Scale from the amax window of earlier commits. Source: Transformer Engine's DelayedScaling."""

    name: ClassVar[str] = "delayed"

    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """Roll the window, take its max (or newest entry), renew scale and descale."""
        return self._roll(live, observation)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentScaling(Recipe):
    """Scale from the tensor in hand. A commit keeps the record, and the scale that ``fallback`` LIVE falls back on.

    Where the amax is 0 (ZeroRule.CLAMP aside), Inf or NaN the scale is what ``fallback`` says; what PROPAGATE and
    INVERT make of Inf and NaN, they make of the tensor in hand. Window and initial rules touch no code.
    """

    name: ClassVar[str] = "current"

    fallback: Fallback = Fallback.ONE

    @property
    def timing(self) -> Timing:
        """CURRENT."""
        return Timing.CURRENT

    def begin(self, live: QuantState, observation: QuantObservation | None, *, op: OpId) -> QuantState:
        """The live state with scale and descale of the observation."""
        assert observation is not None, "the operation checks that current scaling has its observation"
        scale, descale = self._of(live, observation)
        return replace(live, scale=scale, descale=descale)

    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """Roll the window; scale and descale are those of the observation."""
        scale, descale = self._of(live, observation)
        return replace(self._roll(live, observation), scale=scale, descale=descale)

    def _of(self, live: QuantState, observation: QuantObservation) -> tuple[F32, F32]:
        otherwise = np.ones(live.scale.shape, np.float32) if self.fallback is Fallback.ONE else live.scale
        scales = scale_at_once(self, observation, otherwise=otherwise, finite_counts=False)
        if scales is None:
            bad = ~np.isfinite(written_amax(observation))
            scales = self._in_hand(observation, bad=bad, otherwise=otherwise)
        return frozen(scales[0]), frozen(scales[1])
