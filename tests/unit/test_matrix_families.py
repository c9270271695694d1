"""Families of schedules cover every combination that can occur; the seeded workload moves every scale."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.errors import UsageError
from qsim.matrix import FACTORS, families, vacuity
from qsim.matrix.families import possible, rows
from qsim.quant import OpId, TensorRole
from qsim.sim import Feature, Order
from qsim.workloads import Shaping, open_seeded


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_families_hold_every_combination_of_that_many_choices_that_can_occur(strength: int) -> None:
    found = [dict(zip(FACTORS, row, strict=True)) for row in rows(strength)]
    missing = 0
    for factors in itertools.combinations(FACTORS, strength):
        seen = {tuple(row[f] for f in factors) for row in found}
        for choices in itertools.product(*(FACTORS[f] for f in factors)):
            one = dict(zip(factors, choices, strict=True))
            missing += possible(one) and choices not in seen
            assert possible(one) or choices not in seen
    assert missing == 0


def test_families_are_far_fewer_than_all_combinations() -> None:
    everything = np.prod([len(choices) for choices in FACTORS.values()])
    assert everything > 200_000
    assert [True] * 4 == [len(rows(t)) < limit for t, limit in ((1, 10), (2, 60), (3, 250), (4, 900))]


def test_the_same_strength_gives_the_same_families() -> None:
    first = rows(2)
    rows.cache_clear()
    assert first == rows(2)
    assert len(set(first)) == len(first)


def test_a_family_does_what_its_row_says() -> None:
    for row, family in zip(rows(2), families(2), strict=True):
        chosen = dict(zip(FACTORS, row, strict=True))
        spec = family.spec
        assert chosen["order"] == spec.order.value
        assert chosen["microbatches"] == str(spec.batches)
        assert chosen["unit"] == family.cadence.value
        assert chosen["workers"] == str(spec.workers)
        assert {c for f, c in chosen.items() if c in list(Feature)} == {f.value for f in spec.features}
    names = [family.name for family in families(2)]
    assert len(set(names)) == len(names)


def test_what_took_four_features_is_in_no_family_of_strength_two_and_in_some_of_strength_four() -> None:
    def hosts(strength: int) -> int:
        four = [
            f
            for f in families(strength)
            if f.spec.order is Order.ONE_F_ONE_B
            and f.spec.batches > 1
            and Feature.WEIGHT_CACHE in f.spec.features
            and not f.spec.features & {Feature.NO_CHECKPOINT, Feature.SELECTIVE}
        ]
        return len(four)

    assert (0, 0) == (hosts(1), hosts(2))
    assert hosts(4) > hosts(3) > 0


@pytest.mark.parametrize("strength", [0, 5])
def test_another_strength_is_refused(strength: int) -> None:
    with pytest.raises(UsageError, match=f"strength {strength} is outside 1..4"):
        families(strength)


def test_a_family_shows_something() -> None:
    for family in families(1):
        seen, _ = vacuity(family)
        assert not seen.vacuous
        assert seen.layers_differ
        assert (seen.recomputed == 0) == (Feature.NO_CHECKPOINT in family.spec.features)


def seeded(**shaping: object):
    made = Shaping(**shaping)  # type: ignore[arg-type]
    return open_seeded(Path(), shaping=made, seeds=(3, 4), layers=4, microbatches=1).load


def test_seeded_tensors_depend_on_the_operation_and_on_nothing_else() -> None:
    load, again = seeded(), seeded()
    at = OpId(1, 1, 2, 0)
    assert same_bits(load(at), again(at))
    assert same_bits(load(at), load(at._replace(worker_id=1)))
    for other in (
        at._replace(visit=1),
        at._replace(logical_step=2),
        at._replace(microbatch=0),
        at._replace(layer_id=3),
    ):
        assert not np.array_equal(load(at), load(other))
    weight = at._replace(role_id=int(TensorRole.WEIGHT))
    assert same_bits(load(weight), load(weight._replace(microbatch=5)))
    drift = np.abs(load(weight) - load(weight._replace(logical_step=0))).max()
    assert 0 < drift < 0.25 * np.abs(load(weight)).max()
    with pytest.raises(ValueError, match="read-only"):
        load(at)[...] = 0


def test_shaping_reaches_seeded_tensors() -> None:
    at = OpId(1, 0, 1)
    plain = seeded()(at)
    assert same_bits(plain * 8, seeded(layer_spread=(0, 3, 0, 0))(at))
    assert same_bits(plain * np.float32(4), seeded(outlier_steps=(1,), outlier_factor=4.0)(at))
    assert same_bits(plain, seeded(outlier_steps=(0,), outlier_factor=4.0)(at))
