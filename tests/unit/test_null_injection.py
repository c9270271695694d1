"""What injects nothing changes nothing, and what is run twice is one run: bit for bit, on every family."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from qsim.matrix import Family, families
from qsim.matrix.catches import host_case
from qsim.matrix.numbers import play
from qsim.severity import measure_severity
from qsim.sim import FIXES, Case, Trace, judge, records_of
from qsim.sim.defects.model import rewritten


def digest(trace: Trace) -> str:
    """One number for all records and all bits of codes and outputs, in order."""
    found = hashlib.sha256(repr(trace.records).encode())
    for part in (trace.outputs, {seq: cast.codes for seq, cast in trace.casts.items()}):
        for seq in sorted(part):
            found.update(np.ascontiguousarray(part[seq]).tobytes())
    return found.hexdigest()


def null(case: Case) -> Case:
    """A rewrite that goes through every event and changes none."""
    return rewritten(case, [event._replace() for event in case.schedule])


@pytest.mark.parametrize("family", families(1), ids=lambda f: f.name)
def test_a_null_injection_equals_the_golden_run_bit_for_bit(family: Family) -> None:
    case = host_case(family)
    golden, injected = play(case, family), play(null(case), family)
    assert digest(golden) == digest(injected)
    severity = measure_severity(injected, golden)
    assert 0.0 == severity.worst("rel_error").max()
    assert 0.0 == severity.worst("max_abs").max()
    assert not judge(case)


@pytest.mark.parametrize("family", families(1), ids=lambda f: f.name)
def test_a_schedule_that_is_run_twice_has_one_digest(family: Family) -> None:
    case = host_case(family)
    assert digest(play(case, family)) == digest(play(case, family))
    assert records_of(case) == records_of(case)


@pytest.mark.parametrize("fix", ["descale_in_the_data", "keyed_snapshot", "functional_state", "max_merge"])
def test_a_fix_on_a_correct_case_is_a_null_injection(fix: str) -> None:
    for family in families(1):
        case = host_case(family)
        mended = FIXES[fix].rewrite(case)
        assert not judge(mended)
        golden, trace = play(case, family), play(mended, family)
        assert [golden.outputs[seq].tobytes() for seq in sorted(golden.outputs)] == [
            trace.outputs[seq].tobytes() for seq in sorted(trace.outputs)
        ]
