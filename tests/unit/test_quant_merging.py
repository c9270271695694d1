"""Merging observations of microbatches, and many replicas against one at a time: bit for bit."""

import itertools

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.protocol import Sums
from qsim.errors import UsageError
from qsim.formats import E4M3FN
from qsim.quant import (
    AmaxChoice,
    CenterAxis,
    CenterSource,
    CentredDelayedScaling,
    CurrentScaling,
    DelayedScaling,
    NonFiniteRule,
    ObserveMode,
    OpId,
    QuantObservation,
    ScaleSource,
    StateKey,
    Timing,
    ZeroRule,
    begin_logical_quantization,
    commit_quant_observation,
    merge_observations,
    observe_for_future_state,
)

BACKEND = NumbaBackend()
FIELDS = ("op", "amax", "mean", "count", "nan_count", "inf_count")
SUMS = ("total", "exponent", "count")

# ---- merging --------------------------------------------------------------------------------------------

RECIPE = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL)


def parts_of(tensors):
    live = RECIPE.initial(StateKey(), (1,))
    parts = []
    for microbatch, x in enumerate(tensors):
        snapshot = begin_logical_quantization(live, op=OpId(0, microbatch), recipe=RECIPE)
        parts.append(observe_for_future_state(x, snapshot=snapshot, recipe=RECIPE, backend=BACKEND))
    return parts


def same_observation(a, b):
    arrays = [(getattr(a, f), getattr(b, f)) for f in ("amax", "count", "nan_count", "inf_count")]
    arrays += [(getattr(a.mean, f), getattr(b.mean, f)) for f in ("total", "exponent", "count")]
    return a.op == b.op and all(same_bits(x, y) for x, y in arrays)


def microbatches(spread):
    """Three tensors of unequal length; each binade of ``spread`` scales one of them."""
    rng = np.random.default_rng(1)
    return [
        np.ldexp(rng.standard_normal((1, n, 5)), k).astype(np.float32) for n, k in zip((3, 7, 2), spread, strict=True)
    ]


@pytest.mark.parametrize("spread", [(0, 0, 0), (0, -9, 3), (-30, 20, 0)])
def test_merging_does_not_depend_on_the_order(spread):
    parts = parts_of(microbatches(spread))
    merged = merge_observations(parts)
    for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        assert same_observation(merged, merge_observations([parts[i] for i in order]))
    assert OpId(0, 2) == merged.op


def test_merging_equals_one_observation_of_the_whole_where_every_part_is_on_the_common_grid():
    """Elements that are multiples of 2^(k - 40), k the common exponent, are counted exactly: all bits agree.

    float32 has 24 bits, so that holds for every element of magnitude 2^(k - 17) or more, and for 0.
    """
    tensors = [np.where(np.abs(x) < 2.0**-10, np.float32(0), x) for x in microbatches((0, -2, 3))]
    whole = parts_of([np.concatenate(tensors, axis=1)])[0]
    merged = merge_observations(parts_of(tensors))
    assert len({int(p.mean.exponent.max()) for p in parts_of(tensors)}) == 3
    assert same_observation(QuantObservation(**{f: getattr(whole, f) for f in FIELDS} | {"op": merged.op}), merged)


@pytest.mark.parametrize("spread", [(0, -20, 3), (-30, 20, 0), (-21, -22, 0)])
def test_merged_totals_stray_from_the_whole_by_what_the_fixed_point_promises(spread):
    """In units of 2^(k - 40): a part at exponent k is exact; one of N elements s binades below rounds each element
    to its own unit (N 2^-s / 2), its total once (1/2), where the whole rounds each element (N / 2). amax is exact.
    """
    tensors = microbatches(spread)
    parts, whole = parts_of(tensors), parts_of([np.concatenate(tensors, axis=1)])[0]
    merged = merge_observations(parts)
    assert same_bits(whole.amax, merged.amax)
    assert same_bits(whole.mean.exponent, merged.mean.exponent)
    shifts = [(merged.mean.exponent - p.mean.exponent).astype(np.float64) for p in parts]
    bound = sum(
        np.where(s > 0, (p.mean.count * (1 + 2.0**-s) + 1) / 2, 0.0) for p, s in zip(parts, shifts, strict=True)
    )
    strays = np.abs(merged.mean.total - whole.mean.total)
    assert (strays <= bound).all()
    assert strays.max() > 0


def test_merging_nothing_is_an_error_and_one_is_itself():
    (one,) = parts_of(microbatches((0, 0, 0))[:1])
    assert merge_observations([one]) is one
    with pytest.raises(UsageError, match="no observation"):
        merge_observations([])


def test_merged_counts_add_up():
    tensors = [np.full((1, 2, 5), value, np.float32) for value in (1, 2, 3)]
    tensors[1][0, 0, 0], tensors[2][0, 0, 0] = np.nan, -np.inf
    parts = parts_of(tensors)
    merged = merge_observations(parts)
    assert ([30], [1], [1], [3.0]) == tuple(getattr(merged, f).tolist() for f in FIELDS[3:] + FIELDS[1:2])


# ---- replicas -------------------------------------------------------------------------------------------


def one_of(observation, replica):
    """What replica ``replica`` alone says."""
    at = slice(replica, replica + 1)
    mean = observation.mean
    return QuantObservation(
        op=observation.op,
        mean=None if mean is None else Sums(**{f: getattr(mean, f)[at] for f in SUMS}),
        **{f: getattr(observation, f)[at] for f in FIELDS if f not in ("op", "mean")},
    )


def tensors(replicas):
    """Seven steps; in some of them one replica is all zero, holds NaN or Inf, or is far too small or large."""
    rng = np.random.default_rng(7)
    out = []
    for step in range(7):
        x = rng.standard_normal((replicas, 3, 4)).astype(np.float32)
        x[step % replicas] *= np.float32(10.0**step)
        x[(step + 1) % replicas, 0, 0] = (np.nan, np.inf, 1, 1, -np.inf, 1, 1)[step]
        x[(step + 2) % replicas] *= np.float32((1, 0, 1, 0, 1, 1e-40, 0)[step])
        out.append(x)
    return out


RECIPES_IN_USE = [
    *[
        DelayedScaling(fmt=E4M3FN, window=3, choice=choice, zero_rule=zero, nonfinite_rule=bad)
        for choice, zero, bad in itertools.product(AmaxChoice, ZeroRule, NonFiniteRule)
    ],
    *[
        CentredDelayedScaling(fmt=E4M3FN, window=2, axis=axis, nonfinite_rule=bad, observe=mode)
        for axis, bad, mode in itertools.product(CenterAxis, NonFiniteRule, ObserveMode)
    ],
    *[
        CentredDelayedScaling(fmt=E4M3FN, window=2, axis=axis, block=3, nonfinite_rule=bad, source=source)
        for axis, bad, source in itertools.product(CenterAxis, NonFiniteRule, (CenterSource.EMA, CenterSource.CURRENT))
    ],
    *[
        CentredDelayedScaling(
            fmt=E4M3FN, axis=CenterAxis.CHANNEL, nonfinite_rule=bad, source=source, scale_source=ScaleSource.CURRENT
        )
        for bad, source in itertools.product(NonFiniteRule, CenterSource)
    ],
    CurrentScaling(fmt=E4M3FN),
]


@pytest.mark.parametrize("recipe", RECIPES_IN_USE, ids=range(len(RECIPES_IN_USE)))
def test_a_commit_of_many_replicas_equals_single_commits_bit_for_bit(recipe):
    replicas = 4
    together = recipe.initial(StateKey(), (replicas,))
    alone = [recipe.initial(StateKey(), (1,)) for _ in range(replicas)]
    for step, x in enumerate(tensors(replicas)):
        op = OpId(step)
        live = together if recipe.observes_live_center else None
        early = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=BACKEND, op=op, lead=1, live=live)
        current = early if recipe.timing is Timing.CURRENT else None
        snapshot = begin_logical_quantization(together, op=op, recipe=recipe, observation=current)
        seen = observe_for_future_state(x, snapshot=snapshot, recipe=recipe, backend=BACKEND)
        together = commit_quant_observation(together, seen, recipe=recipe)
        alone = [
            commit_quant_observation(live, one_of(seen, replica), recipe=recipe) for replica, live in enumerate(alone)
        ]
        for name in ("scale", "descale", "amax_history", "center", "center_seen"):
            if getattr(together, name) is not None:
                expected = np.concatenate([getattr(live, name) for live in alone])
                assert same_bits(expected, getattr(together, name)), (step, name)
        assert {together.epoch} == {live.epoch for live in alone}


@pytest.mark.parametrize("recipe", [RECIPES_IN_USE[0], RECIPE], ids=["delayed", "centred"])
def test_an_observation_of_many_replicas_equals_single_observations_bit_for_bit(recipe):
    for step, x in enumerate(tensors(4)):
        many = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=BACKEND, op=OpId(step), lead=1)
        for replica in range(4):
            single = observe_for_future_state(
                x[replica : replica + 1], snapshot=None, recipe=recipe, backend=BACKEND, op=OpId(step), lead=1
            )
            mine = one_of(many, replica)
            assert all(same_bits(getattr(single, f), getattr(mine, f)) for f in FIELDS if f not in ("op", "mean"))
            if recipe.centred:
                assert all(same_bits(getattr(single.mean, f), getattr(mine.mean, f)) for f in SUMS)
