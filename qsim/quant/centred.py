"""The centred recipe: what a centre serves, which tensors it follows from, and its scale. Knows no schedule, no cast.

Every rule is branch-free over replicas and over the values of a centre: masks choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import ClassVar

import numpy as np

from qsim.arrays import F32, Bool, frozen, per_lead
from qsim.codec.means import Sums
from qsim.codec.scaled.recipes import ScaleRecipe
from qsim.errors import UsageError
from qsim.quant.at_once import mean_at_once, scale_at_once
from qsim.quant.identity import OpId, StateKey
from qsim.quant.merging import is_bad
from qsim.quant.recipes import Recipe
from qsim.quant.rules import InitialScale, NonFiniteRule, Timing
from qsim.quant.state import Metadata, QuantObservation, QuantState


class CenterAxis(StrEnum):
    """What one centre value serves, and the centre's shape after the replica axes (tokens T, columns K)."""

    TENSOR = "tensor"  # [1, 1]
    CHANNEL = "channel"  # [1, K]
    TOKEN = "token"  # [T, 1]: the mean of each row
    BLOCK = "block"  # [T, ceil(K / block)]: the mean of each row's blocks; a tail block of what is there


class CenterSource(Enum):
    """Which tensors the centre in force is a mean of."""

    CURRENT = "the tensor in hand"
    LAST = "the last committed observation"
    EMA = "every committed observation, by a running mean"


class ScaleSource(Enum):
    """Which residual the scale follows from."""

    CURRENT = "the residual of the tensor in hand, about the centre in force"
    DELAYED = "the window of residuals of earlier commits"


class ObserveMode(Enum):
    """Whose residual the amax of a centred observation is of."""

    IN_FORCE = "the centre in force: one pass; may under-cover by |c_next - c|"
    NEXT = "the centre that a commit of this tensor alone would make (LAST: its own mean): two passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CentredDelayedScaling(Recipe):
    """Scaling of the residual x - c about a mean c. By default: delayed, about the mean of the last commit.

    Scale and centre are one version: they commit together under one epoch. A centre is finite and never -0, and +0
    until something was observed. With m the mean of the observed finite elements, the centre is

    - CURRENT: m of the tensor in hand, +0 where it has no finite element. A commit only keeps the record.
    - LAST: m of the last observation that counted.
    - EMA: m of the first observation that counted, from then on c' = RN(RN(b*c) + RN(RN(1 - b)*m)), b = RN(``beta``),
      every step float32; value by value of the centre.

    For LAST and EMA a tensor with NaN or Inf does not count (unless the non-finite rule is FINITE), and neither does a
    channel, token or block without a finite element: its centre stays.

    ``scale_source`` CURRENT: the scale is 1 where the amax is 0, and for a tensor with NaN or Inf unless the rule is
    FINITE; the window rolls all the same. ``block``: columns of a block. ``elements``: a block recipe that encodes the
    residual with scales of the tensor in hand; the state's own scale and window roll on, and touch no code.
    """

    name: ClassVar[str] = "centred"

    axis: CenterAxis = CenterAxis.TENSOR
    block: int = 16
    source: CenterSource = CenterSource.LAST
    beta: float = 0.9
    scale_source: ScaleSource = ScaleSource.DELAYED
    observe: ObserveMode = ObserveMode.IN_FORCE
    elements: ScaleRecipe | None = None

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        if self.block < 1:
            raise UsageError(f"block {self.block} of a block centre; it needs at least 1 column")
        if not (0 <= self.beta < 1 and np.float32(self.beta) < 1):
            raise UsageError(f"beta {self.beta} of a running mean is not in 0 <= beta < 1 as float32")
        if self.observes_live_center and self.observe is ObserveMode.NEXT:
            raise UsageError(
                f"observe NEXT with scale_source CURRENT and source {self.source.name}: that scale is of the residual "
                "about the centre in force; use observe IN_FORCE"
            )
        late = self.observe is ObserveMode.NEXT and self.source is not CenterSource.CURRENT
        if late and self.initial_rule is not InitialScale.GIVEN:
            raise UsageError(
                f"observe NEXT with initial_rule {self.initial_rule.name} and source {self.source.name}: the first "
                "scale is of the residual about the centre in force; use observe IN_FORCE"
            )
        for fmt in (self.fmt, self.grad_fmt or self.fmt):
            if self.elements is not None and fmt != self.elements.fmt:
                raise UsageError(
                    f"fmt {fmt.name} with elements {self.elements.name}, which encodes {self.elements.fmt.name}; "
                    "give both the same format"
                )

    @property
    def timing(self) -> Timing:
        """CURRENT where the centre or the scale is of the tensor in hand."""
        in_hand = self.source is CenterSource.CURRENT or self.scale_source is ScaleSource.CURRENT
        return Timing.CURRENT if in_hand else Timing.DELAYED

    @property
    def centred(self) -> bool:
        """True: a centre is subtracted before encode and added after decode."""
        return True

    @property
    def observes_next_center(self) -> bool:
        """True in mode NEXT, and where the centre in force is made of the tensor in hand."""
        return self.observe is ObserveMode.NEXT or self.source is CenterSource.CURRENT

    @property
    def observes_live_center(self) -> bool:
        """True where the scale is of the tensor in hand, and the centre of earlier ones."""
        return self.scale_source is ScaleSource.CURRENT and self.source is not CenterSource.CURRENT

    @property
    def center_block(self) -> int:
        """``block`` where the axis is BLOCK."""
        return self.block if self.axis is CenterAxis.BLOCK else 0

    @property
    def block_recipe(self) -> ScaleRecipe | None:
        """``elements``."""
        return self.elements

    def initial(self, owner: StateKey, lead: tuple[int, ...] = (), rest_ndim: int = 2) -> QuantState:
        """Initial scale, empty window, centre +0, no running mean begun."""
        plain = Recipe.initial(self, owner, lead, rest_ndim)
        shape = (*lead, *(1,) * rest_ndim)
        return replace(
            plain,
            center=frozen(np.zeros(shape, np.float32)),
            center_seen=frozen(np.zeros(shape, np.bool_)) if self.source is CenterSource.EMA else None,
            center_block=self.center_block,
        )

    def mean_axes(self, ndim: int, lead: int) -> tuple[int, ...]:
        """The axes that one centre value is the mean over; of blocks, the columns of [..., blocks, columns]."""
        match self.axis:
            case CenterAxis.TENSOR:
                return tuple(range(lead, ndim))
            case CenterAxis.CHANNEL:
                return tuple(range(lead, ndim - 1))
            case CenterAxis.TOKEN:
                return (ndim - 1,)
            case CenterAxis.BLOCK:
                return (ndim,)

    def begin(self, live: QuantState, observation: QuantObservation | None, *, op: OpId) -> QuantState:
        """The live state, with the centre and the scale that follow from the tensor in hand."""
        held = self._before_use(live, observation, op)
        return held if observation is None else self._in_force(held, observation)

    def advance(self, live: QuantState, observation: QuantObservation) -> QuantState:
        """Roll the window of residual amaxes and renew the scale; move the centre where the observation counts."""
        assert observation.mean is not None, "a centred recipe observes a mean"
        rolled = self._in_force(self._roll(live, observation), observation)
        if self.source is CenterSource.CURRENT:
            return rolled
        assert live.center is not None, "a centred state has a centre"
        after = self.center_after(live, observation.mean)
        moves = per_lead(self._counts(observation), after) & (observation.mean.count > 0)
        center = np.where(moves, after, live.center).astype(np.float32)
        seen = None if live.center_seen is None else frozen(live.center_seen | moves)
        return replace(rolled, center=frozen(center), center_seen=seen)

    def center_after(self, held: Metadata | None, sums: Sums) -> F32:
        """The centre that ``sums`` make of the one held, if they count: their mean, or the running mean."""
        mean = mean_at_once(sums)
        if held is not None and held.center is not None and self.source is not CenterSource.CURRENT:
            _check_fit(held, mean)
        if self.source is not CenterSource.EMA:
            return mean
        if held is None or held.center is None or held.center_seen is None:
            raise UsageError(f"recipe {self.name} with source EMA continues a running mean; pass its state or snapshot")
        b, c = np.float32(self.beta), held.center
        # numpy rounds each of the four steps and contracts none. No sum is Inf: it grows with |c| and |m|, and at
        # FLT_MAX it is finite for every float32 b (tried, all of them). + 0 makes a -0, of two underflows, +0.
        blend = b * c + (np.float32(1) - b) * mean + np.float32(0)
        return np.where(held.center_seen, blend, mean).astype(np.float32)

    def _in_force(self, held: QuantState, observation: QuantObservation) -> QuantState:
        """``held`` with what follows from the observed tensor alone: a CURRENT centre, a CURRENT scale."""
        if self.source is CenterSource.CURRENT:
            assert observation.mean is not None, "a centred recipe observes a mean"
            held = replace(held, center=frozen(mean_at_once(observation.mean)))
        if self.scale_source is ScaleSource.CURRENT:
            ones = np.ones(held.scale.shape, np.float32)
            finite_counts = self.nonfinite_rule is NonFiniteRule.FINITE
            scales = scale_at_once(self, observation, otherwise=ones, finite_counts=finite_counts)
            if scales is None:
                scales = self._in_hand(observation, bad=~self._counts(observation), otherwise=ones)
            held = replace(held, scale=frozen(scales[0]), descale=frozen(scales[1]))
        return held

    def _counts(self, observation: QuantObservation) -> Bool:
        """The replicas [lead] in which the observation counts."""
        bad = is_bad(observation)
        return np.ones_like(bad) if self.nonfinite_rule is NonFiniteRule.FINITE else ~bad


def _check_fit(held: Metadata, mean: F32) -> None:
    center = held.center
    assert center is not None, "only a centre is checked"
    if center.ndim != mean.ndim or any(c not in (1, m) for c, m in zip(center.shape, mean.shape, strict=True)):
        raise UsageError(
            f"means {list(mean.shape)} do not fit the centre {list(center.shape)} of owner {held.owner}; a centre of "
            "earlier tensors needs the same tokens and columns in all of them"
        )
