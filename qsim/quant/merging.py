"""Several observations of one unit as one. Knows no state: what a rule needs of it, the recipe applies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from qsim.arrays import F32, FLT_MAX, I64, Bool, frozen
from qsim.errors import ProtocolViolation, UsageError
from qsim.quant.at_once import merge_at_once
from qsim.quant.identity import StateKey
from qsim.quant.rules import MergeRule
from qsim.quant.state import QuantObservation, frozen_arrays

_BY_MAX = (MergeRule.MAX, MergeRule.CLIP, MergeRule.DECAY)
_BY_SUM = (MergeRule.SUM, MergeRule.MEAN)


def is_bad(observation: QuantObservation) -> Bool:
    """The replicas [lead] that held NaN or Inf."""
    return (observation.nan_count > 0) | (observation.inf_count > 0)


def written_amax(observation: QuantObservation) -> F32:
    """The amax [lead] with the NaN and Inf in it: NaN where one was observed, else Inf where one was.

    Where a merge that is no maximum wrote the amax, what it wrote: an Inf of an earlier microbatch may be gone.
    """
    if observation.written is not None:
        return observation.written
    bad = is_bad(observation)
    if not bad.any():  # a shortcut, not a branch of the rule: np.where of no True is its other operand
        return observation.amax
    poison = np.where(observation.nan_count > 0, np.float32(np.nan), np.float32(np.inf))
    return np.where(bad, poison, observation.amax).astype(np.float32)


def merge_observations(
    observations: Sequence[QuantObservation], *, owner: StateKey | None = None, rule: MergeRule = MergeRule.MAX
) -> QuantObservation:
    """One observation of several (microbatches, workers, ranks): amax by ``rule``, means by their sums and counts.

    The order does not matter under MAX. CLIP and DECAY merge by max here: bound and state are the recipe's to apply.
    ``op`` is the latest op. Raises UsageError for an empty sequence, and ProtocolViolation for an observation that
    ``owner``, where it is given, does not own.
    """
    if not observations:
        raise UsageError("no observation to merge; a commit needs at least one")
    for seen in observations:
        if owner is not None and not owner.owns(seen.op):
            raise ProtocolViolation(f"merge of a foreign observation: owner {owner}, {seen.op}; merge its own alone")
    if len(observations) == 1:
        return observations[0]
    sums = [o.mean for o in observations if o.mean is not None]
    amax = _merged([o.amax for o in observations], rule)
    if rule in _BY_SUM:  # the amax is a finite number; that the sum overflowed is written
        amax = np.minimum(amax, FLT_MAX)
    # under MAX what is written follows from the counts; a part that another rule wrote has it written down
    plain = rule in _BY_MAX and all(o.written is None for o in observations)
    return QuantObservation(
        op=max(o.op for o in observations),
        amax=frozen(np.asarray(amax)),
        mean=frozen_arrays(merge_at_once(sums)) if sums else None,
        count=_total([o.count for o in observations]),
        nan_count=_total([o.nan_count for o in observations]),
        inf_count=_total([o.inf_count for o in observations]),
        about=observations[0].about if len({o.about for o in observations}) == 1 else None,
        written=None if plain else frozen(np.asarray(_merged([written_amax(o) for o in observations], rule))),
    )


def _merged(amaxes: Sequence[F32], rule: MergeRule) -> F32:
    """float32 [lead] of the parts by ``rule``; NaN wins, Inf + Inf is Inf, and a sum may overflow to Inf."""
    if rule is MergeRule.LAST:
        return amaxes[-1]
    if rule in _BY_MAX:
        return np.asarray(reduce(np.maximum, amaxes))
    with np.errstate(over="ignore"):
        total = amaxes[0]
        for amax in amaxes[1:]:  # one by one: np.add.reduce may pair them, and then the order of rounding is its own
            total = np.asarray(total + amax)
        return total if rule is MergeRule.SUM else np.asarray(total / np.float32(len(amaxes)))


def _total(counts: Sequence[I64]) -> I64:
    return frozen(np.asarray(reduce(np.add, counts), np.int64))
