"""Cases replayed on the CUDA texts: the bits of the numba backend, and tensors that stay where the kernels run."""

import numpy as np
import pytest

from qsim.sim import Env, get_defect, run
from tests.backends import EMULATED
from tests.unit.sim_cases import POLICY, WITH_GRADIENTS, case_of, env_of, recipe_of, tensors

SEEDS = (0, 1, 5)


def traced(case, backend):
    env = Env(load=tensors(SEEDS), backend=backend, recipe=case.recipe, policy=POLICY, lead=(len(SEEDS),))
    return run(case, env)


def assert_same_trace(expected, got):
    assert expected.records == got.records
    for name in ("inputs", "outputs"):
        mine, theirs = getattr(expected, name), getattr(got, name)
        assert list(mine) == list(theirs)
        for seq in mine:
            assert isinstance(theirs[seq], np.ndarray)
            assert mine[seq].tobytes() == theirs[seq].tobytes(), (name, seq)
    for seq, cast in expected.casts.items():
        other = got.casts[seq]
        assert cast.same_bits(other), seq
        assert cast.amax.tobytes() == other.amax.tobytes()
        for count in ("saturated", "flushed", "nan", "inf"):
            assert getattr(cast.counts, count).tolist() == getattr(other.counts, count).tolist()
    for seq, operands in expected.used.items():
        for a, b in zip(operands, got.used[seq], strict=True):
            assert (a.cast, a.descale.descale.tobytes()) == (b.cast, b.descale.descale.tobytes())


CASES = [("", "delayed", "e4m3"), ("", "current", "e2m1"), ("", "centred", "e5m2"), ("D01", "delayed", "e4m3"),
         ("D03", "centred", "e2m1"), ("D07", "centred", "e4m3"), ("D10", "delayed", "e5m2")]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("defect", "recipe", "fmt"), CASES)
def test_a_replayed_case_has_the_bits_of_the_cpu(backend, defect, recipe, fmt):
    found = get_defect(defect) if defect else None
    case = case_of(recipe_of(recipe, fmt), defect=found, body=WITH_GRADIENTS)
    case = found.rewrite(case) if found else case
    assert_same_trace(run(case, env_of(case, seeds=SEEDS)), traced(case, backend))
