"""Each axis of a commit on one stream, worked out by hand; all of them against a twin in fractions; replicas."""

import itertools

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.errors import UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2
from qsim.quant import (
    AmaxChoice,
    DelayedScaling,
    Fallback,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    ScaleGrid,
    WindowRule,
    ZeroRule,
    make_recipe,
)
from tests.unit.axis_cases import INF, NAN, STREAM, TOP, Twin, inverse, life, rn

ROLL, CLAMP = {"zero_rule": ZeroRule.ROLL}, {"zero_rule": ZeroRule.CLAMP}
EXCLUDED = {"window_rule": WindowRule.EXCLUDED}
THIRD = rn(149 + 1 / 3)  # 448 / 3, a double that rounds as the fraction does


def numbers(*values):
    return [np.array([v], np.float32) for v in values]


def check(recipe, used, stored):
    """Scales and descales, bit for bit, of ``STREAM``; lists of numbers."""
    got = life(recipe, [STREAM])
    for which, expected in ((0, used), (1, stored)):
        for step, (scale, want) in enumerate(zip((pair[which][0] for pair in got), numbers(*expected), strict=True)):
            assert same_bits(want, scale), (which, step, want, scale)
        for step, (pair, want) in enumerate(zip(got, expected, strict=True)):
            assert same_bits(numbers(inverse(want))[0], pair[which][1]), (which, step)


# E4M3, max 448; STREAM = 4 0 0 2 Inf 8 64 NaN 3 3; 448/4 = 112, 448/2 = 224, 448/8 = 56, 448/64 = 7.
# Windows of two when a 0 rolls in: (0 4) (4 0) (0 0) (0 2) (2 Inf) (Inf 8) (8 64) (64 NaN) (NaN 3) (3 3).
ROLLED = [112, 112, 112, 224, 224, 224, 7, 7, 7, THIRD]  # (0 0) and what holds Inf or NaN keep the scale
BY_HAND = {
    # (0 4), the zeros move nothing, (4 2), (2 Inf), (Inf 8), (8 64), (64 NaN), (NaN 3), (3 3)
    "zero skip": ({}, 2, [112, 112, 112, 112, 112, 112, 7, 7, 7, THIRD]),
    "zero roll": (ROLL, 2, ROLLED),
    # (0 0) speaks for 2^-10: 448 * 1024
    "zero clamp": ({**CLAMP, "eps": 2.0**-10}, 2, [112, 112, 458752, 224, 224, 224, 7, 7, 7, THIRD]),
    # 448 * 2^125 is beyond FLT_MAX
    "zero clamp at the top": ({**CLAMP, "eps": 2.0**-125}, 2, [112, 112, TOP, 224, 224, 224, 7, 7, 7, THIRD]),
    # Inf and NaN move nothing: (0 2) stays, (2 8), (8 64) stays, (64 3), (3 3)
    "nonfinite skip": (
        {**ROLL, "nonfinite_rule": NonFiniteRule.SKIP}, 2, [112, 112, 112, 224, 224, 56, 7, 7, 7, THIRD],
    ),
    # the finite part is 2: (2 2) (2 8) (8 64) (64 2) (2 3) (3 3)
    "nonfinite finite": (
        {**ROLL, "nonfinite_rule": NonFiniteRule.FINITE}, 2, [112, 112, 112, 224, 224, 56, 7, 7, THIRD, THIRD],
    ),
    # 448 / Inf = 0 while Inf is in the window, NaN while NaN is
    "nonfinite propagate": (
        {**ROLL, "nonfinite_rule": NonFiniteRule.PROPAGATE}, 2, [112, 112, 112, 224, 0, 0, 7, NAN, NAN, THIRD],
    ),
    # the commit that brings it keeps the scale, the next one, (Inf 8) and (NaN 3), inverts it
    "nonfinite invert": (
        {**ROLL, "nonfinite_rule": NonFiniteRule.INVERT}, 2,
        [112, 112, 112, 224, 224, rn(1 / 224), 7, 7, rn(1 / 7), THIRD],
    ),
    # of the window before: the same scales, one commit later
    "excluded 2": ({**ROLL, **EXCLUDED}, 2, [1, *ROLLED[:-1]]),
    "included 1": (ROLL, 1, [112, 112, 112, 224, 224, 56, 7, 7, THIRD, THIRD]),
    "excluded 1": ({**ROLL, **EXCLUDED}, 1, [1, 112, 112, 112, 224, 224, 56, 7, 7, THIRD]),
    # (0 0 4) (0 4 0) (4 0 0) (0 0 2), and then Inf or NaN is in every window
    "included 3": (ROLL, 3, [112, 112, 112, 224, 224, 224, 224, 224, 224, 224]),
    "excluded 3": ({**ROLL, **EXCLUDED}, 3, [1, 112, 112, 112, 224, 224, 224, 224, 224, 224]),
    # 64 <= 112, 128 <= 224, 4 <= 7, 128 <= 149.3
    "power of two": ({**ROLL, "grid": ScaleGrid.POWER_OF_TWO}, 2, [64, 64, 64, 128, 128, 128, 4, 4, 4, 128]),
    # margin 1: 224 / 4 = 56, ...
    "power of two, margin 1": (
        {**ROLL, "grid": ScaleGrid.POWER_OF_TWO, "margin": 1}, 2, [32, 32, 32, 64, 64, 64, 2, 2, 2, 64],
    ),
    # entries 4, 0, 0, 2, Inf -> 16, 8, 64 -> 16, NaN, 3, 3; 448 / 16 = 28
    "clip": (
        {**ROLL, "merge_rule": MergeRule.CLIP, "amax_bound": 16.0}, 1,
        [112, 112, 112, 224, 28, 56, 28, 28, THIRD, THIRD],
    ),
    # entries 4, 2, 1, 2, 2 (the finite part), 8, 64, 32, 16, 8
    "decay": (
        {**ROLL, "merge_rule": MergeRule.DECAY, "decay": 0.5, "nonfinite_rule": NonFiniteRule.FINITE}, 1,
        [112, 224, 448, 224, 224, 56, 7, 14, 28, 56],
    ),
    # half of Inf is Inf: it never leaves
    "decay and latch": ({**ROLL, "merge_rule": MergeRule.DECAY, "decay": 0.5}, 1, [112, 224, 448] + [224] * 7),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_scales_and_descales_of_one_stream_are_those_worked_out_by_hand(name):
    options, window, stored = BY_HAND[name]
    recipe = DelayedScaling(fmt=E4M3FN, window=window, **options)
    check(recipe, stored if "excluded" in name else [1, *stored[:-1]], stored)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_without_the_newest_encodes_alike_and_stores_the_scale_of_the_codes(window):
    included, excluded = (
        life(DelayedScaling(fmt=E4M3FN, window=window, window_rule=rule), [STREAM]) for rule in WindowRule
    )
    assert [used[0] for used, _ in included] == [used[0] for used, _ in excluded] == [s[0] for _, s in excluded]
    assert [used[0] for used, _ in included] != [stored[0] for _, stored in included]


# ---- the systems of facts, one literal each -----------------------------------------------------------------

# The stream again, 4 0 0 2 Inf 8 64 NaN 3 3; windows of two but for msamp.
SKIPPED = [112, 112, 112, 112, 112, 112, 7, 7, 7, THIRD]
EPS = rn(1e-12)
SYSTEMS = {
    "te_fused": ("delayed", 2, {}, [1, *SKIPPED[:-1]], SKIPPED),
    "te_unfused": ("delayed", 2, ROLL, [1, *ROLLED[:-1]], ROLLED),
    "te_jax": ("delayed", 2, {**ROLL, "merge_rule": MergeRule.LAST}, [1, *ROLLED[:-1]], ROLLED),
    "flax": ("delayed", 2, {**ROLL, **EXCLUDED}, [1, *ROLLED[:-1]], [1, *ROLLED[:-1]]),
    # the first scale is of the first tensor; (0 0) is 1e-12; Inf and NaN go through
    "torchao_delayed": (
        "delayed", 2,
        {
            **CLAMP, "nonfinite_rule": NonFiniteRule.PROPAGATE, "initial_rule": InitialScale.FROM_DATA,
            "merge_rule": MergeRule.LAST,
        },
        [112, 112, 112, rn(448 / EPS), 224, 0, 0, 7, NAN, NAN],
        [112, 112, rn(448 / EPS), 224, 0, 0, 7, NAN, NAN, THIRD],
    ),
    # in time: of the tensor in hand. 112 -> 64, kept, kept, 224 -> 128, 1/128, 56 -> 32, 7 -> 4, 1/4, 149.3 -> 128
    "msamp": (
        "current", 1,
        {
            "grid": ScaleGrid.POWER_OF_TWO, "fallback": Fallback.LIVE, "nonfinite_rule": NonFiniteRule.INVERT,
            "merge_rule": MergeRule.LAST,
        },
        [64, 64, 64, 128, 1 / 128, 32, 4, 1 / 4, 128, 128],
        [64, 64, 64, 128, 1 / 128, 32, 4, 1 / 4, 128, 128],
    ),
    "seed_correct": ("delayed", 2, {}, [1, *SKIPPED[:-1]], SKIPPED),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_scales_of_each_system_are_those_worked_out_by_hand(name):
    recipe, window, options, used, stored = SYSTEMS[name]
    check(make_recipe(recipe, fmt=E4M3FN, window=window, **options), used, stored)


# ---- all axes against the twin ------------------------------------------------------------------------------


SPECIAL = np.array([0, 0, INF, NAN, 2.0**-149, TOP, 1e-13, 1.75, 448 / 3], np.float32)


def drawn(*seed, steps=9):
    """Amaxes over many binades, four in ten of them special: 0, Inf, NaN, subnormal, the largest."""
    rng = np.random.default_rng(seed)
    plain = rng.lognormal(0, 6, steps).astype(np.float32)
    return np.where(rng.random(steps) < 0.4, rng.choice(SPECIAL, steps), plain).tolist()


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("window_rule", list(WindowRule))
@pytest.mark.parametrize("nonfinite_rule", list(NonFiniteRule))
def test_every_combination_of_axes_equals_the_twin_in_fractions_in_each_of_three_replicas(
    window, window_rule, nonfinite_rule
):
    merges = [{}, {"merge_rule": MergeRule.CLIP, "amax_bound": 5.0}, {"merge_rule": MergeRule.DECAY, "decay": 0.3}]
    rest = itertools.product(AmaxChoice, ZeroRule, InitialScale, ScaleGrid, merges)
    for case, (choice, zero_rule, initial_rule, grid, merge) in enumerate(rest):
        recipe = DelayedScaling(
            fmt=(E4M3FN, E5M2, E2M1FN)[case % 3], window=window, margin=case % 2, choice=choice, zero_rule=zero_rule,
            nonfinite_rule=nonfinite_rule, initial_scale=(1.0, 3.0)[case % 2], window_rule=window_rule,
            initial_rule=initial_rule, grid=grid, **merge,
        )  # fmt: skip
        streams = [drawn(case, window, replica) for replica in range(3)]
        twins = [Twin(recipe) for _ in streams]
        for step, (used, stored) in enumerate(life(recipe, streams)):
            wanted = [twin.step(stream[step]) for twin, stream in zip(twins, streams, strict=True)]
            for which, got in enumerate((used, stored)):
                scales = [pair[which] for pair in wanted]
                assert same_bits(np.array(scales, np.float32), got[0]), (recipe, streams, step, which)
                assert same_bits(np.array([inverse(s) for s in scales], np.float32), got[1]), (recipe, step, which)


@pytest.mark.parametrize("name", [*BY_HAND, *SYSTEMS])
def test_three_replicas_together_equal_each_alone(name):
    if name in SYSTEMS:
        kind, window, options, *_ = SYSTEMS[name]
    else:
        (options, window, _), kind = BY_HAND[name], "delayed"
    recipe = make_recipe(kind, fmt=E4M3FN, window=window, **options)
    streams = [STREAM, STREAM[::-1], drawn(5, steps=len(STREAM))]
    together = life(recipe, streams)
    for replica, stream in enumerate(streams):
        for step, alone in enumerate(life(recipe, [stream])):
            for which, what in itertools.product((0, 1), (0, 1)):
                expected, got = alone[which][what], together[step][which][what][replica : replica + 1]
                assert same_bits(expected, got), (replica, step, which, what)


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"eps": v}, "eps .* is not a positive") for v in (0, -1.0, NAN, INF, 1e-40)],
        ({"merge_rule": MergeRule.CLIP}, "merge_rule CLIP with amax_bound None; .* give amax_bound"),
        ({"amax_bound": 4.0}, "merge_rule MAX with amax_bound 4.0; .*belongs to CLIP: leave amax_bound out"),
        ({"merge_rule": MergeRule.DECAY}, "merge_rule DECAY with decay None; .* give decay"),
        ({"merge_rule": MergeRule.CLIP, "amax_bound": 4.0, "decay": 0.5}, "leave decay out"),
        *[({"merge_rule": MergeRule.CLIP, "amax_bound": v}, "amax_bound .* is not a pos") for v in (0, NAN, INF)],
        *[({"merge_rule": MergeRule.DECAY, "decay": v}, "decay .* is not in 0 < decay <= 1") for v in (0, 1.1, NAN)],
    ],
)
def test_an_axis_without_what_it_needs_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DelayedScaling(fmt=E4M3FN, **options)
