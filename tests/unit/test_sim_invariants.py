"""The judges themselves, on records written by hand: each sees its own fault and no other."""

from __future__ import annotations

import pytest

from qsim.quant import OpId
from qsim.record import OperandRecord, Record, Seen, Version
from qsim.sim import RULES, Cadence, broken, check
from qsim.sim.scopes import LAYER, LAYER_WORKER, MODEL

OP = OpId(0)
NEXT = OpId(1)
OTHER = OpId(0, layer_id=1)
OWNER, FOREIGN = str(LAYER(OP)), str(LAYER(OTHER))


def at(epoch: int, owner: str = OWNER, op: OpId | None = OP) -> Version:
    return Version(owner, epoch, op)


def operand(**changes: object) -> OperandRecord:
    paired = OperandRecord(of=OP, codes_op=OP, codes=at(0), descale=at(0), center=None, version=at(0))
    return paired._replace(**changes)


def life(**changes: object) -> list[Record]:
    """The records of one correct unit of one owner; each keyword replaces the record of that name."""
    records = {
        "begin": Record(0, "begin", "f", OP, OWNER, 0, 0, at(0)),
        "quantize": Record(1, "quantize", "f", OP, used=at(0)),
        "observe": Record(2, "observe", "f", OP, used=at(0)),
        "commit": Record(3, "commit", "f", OP, OWNER, 0, 1, seen=(Seen(OP, "f"),)),
        "consume": Record(4, "consume", "f", OP, operands=(operand(),), gemm="linear"),
        "requantize": Record(5, "quantize", "r", OP, used=at(0)),
        "reconsume": Record(6, "consume", "r", OP, operands=(operand(),), gemm="linear"),
    }
    records.update(changes)  # type: ignore[arg-type]
    return [record for record in records.values() if record is not None]


def verdict(records: list[Record], scope=LAYER, unit: Cadence = Cadence.MICROBATCH) -> set[str]:
    return set(broken(check(records, scope=scope, unit=unit)))


def consume(**changes: object) -> Record:
    return Record(4, "consume", "f", OP, operands=(operand(**changes),), gemm="linear")


def test_a_correct_life_breaks_nothing() -> None:
    assert set() == verdict(life())


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ({"I1"}, {"consume": consume(descale=at(1, op=None), version=at(1, op=None))}),
        ({"I1", "I7"}, {"consume": consume(descale=at(1))}),
        ({"I1", "I7"}, {"consume": consume(center=at(1))}),
        ({"I7"}, {"consume": consume(version=at(1))}),
        ({"I2"}, {"requantize": Record(5, "quantize", "r", OP, used=at(1))}),
        ({"I2"}, {"requantize": Record(5, "quantize", "r", NEXT, used=at(0))}),
        ({"I4"}, {"consume": consume(codes_op=OTHER)}),
        ({"I1", "I4", "I7"}, {"consume": consume(descale=at(0, FOREIGN))}),
        ({"I4"}, {"begin": Record(0, "begin", "f", OP, FOREIGN, 0, 0, at(0))}),
        ({"I4"}, {"commit": Record(3, "commit", "f", OP, FOREIGN, 0, 1, seen=(Seen(OP, "f"),))}),
        ({"I5"}, {"commit": Record(3, "commit", "f", OP, OWNER, 0, 1, seen=())}),
        ({"I5"}, {"commit": Record(3, "commit", "f", OP, OWNER, 0, 1, seen=(Seen(OP, "f"), Seen(OP, "r")))}),
        ({"I5"}, {"commit": Record(3, "commit", "f", OP, OWNER, 0, 1, seen=(Seen(OP, "f"),) * 2)}),
        ({"I5"}, {"commit": Record(3, "commit", "f", OP, OWNER, 0, 1, seen=(Seen(NEXT, "f"),))}),
        ({"I3", "I5"}, {"again": Record(7, "commit", "r", OP, OWNER, 1, 2, seen=(Seen(OP, "r"),))}),
        ({"I3"}, {"again": Record(7, "commit", "r", OP, OWNER, 1, 2)}),
        ({"I3"}, {"unseen": Record(7, "observe", "f", NEXT, used=at(1))}),
        ({"I3"}, {"late": Record(7, "store", "f", NEXT, OWNER, 1, 1, at(0))}),
        ({"I3"}, {"skipped": Record(7, "commit", "f", NEXT, OWNER, 3, 4)}),
        ({"I12"}, {"commit": None}),
    ],
)
def test_a_fault_breaks_exactly_its_rules(expected: set[str], changes: dict[str, Record | None]) -> None:
    assert expected == verdict(life(**changes))


def test_an_owner_that_never_commits_is_left_to_liveness_and_one_that_skips_a_unit_is_not() -> None:
    idle = [Record(i, "observe", "f", OpId(i)) for i in range(4)]
    assert {"I12"} == verdict(idle)
    once = [*idle, Record(4, "commit", "f", OpId(0), OWNER, 0, 1, seen=(Seen(OpId(0), "f"),))]
    found = check(once, scope=LAYER, unit=Cadence.MICROBATCH)
    assert [("I3", i) for i in (1, 2, 3)] == [(v.invariant, v.event) for v in found]


def test_the_unit_decides_how_many_commits_are_due() -> None:
    two = [
        Record(0, "observe", "f", OpId(0, 0)),
        Record(1, "commit", "f", OpId(0, 0), OWNER, 0, 1, seen=(Seen(OpId(0, 0), "f"),)),
        Record(2, "observe", "f", OpId(0, 1)),
        Record(3, "commit", "f", OpId(0, 1), OWNER, 1, 2, seen=(Seen(OpId(0, 1), "f"),)),
    ]
    assert set() == verdict(two, unit=Cadence.MICROBATCH)
    assert {"I3"} == verdict(two, unit=Cadence.STEP)
    assert {"I3"} == verdict(two, unit=Cadence.NEVER)


def test_the_declared_scope_decides_who_owns() -> None:
    assert {"I4"} == verdict(life(), scope=LAYER_WORKER)
    assert {"I4"} == verdict(life(), scope=MODEL)


def test_a_violation_says_what_was_due_and_what_was_found() -> None:
    (found,) = check(life(consume=consume(descale=at(1), version=at(1))), scope=LAYER, unit=Cadence.MICROBATCH)
    assert "codes made with L0/qkv/input@0 are decoded with the descale of L0/qkv/input@1" == found.because
    assert (4, OWNER) == (found.event, found.owner)


def test_an_operand_that_was_never_cast_is_not_judged() -> None:
    raw = OperandRecord(of=OP, codes_op=None, codes=None, descale=None, center=None, version=None)
    assert set() == verdict([Record(0, "consume", "f", OP, operands=(raw, raw), gemm="linear")])


def test_rules_are_registered_once_and_under_their_own_id() -> None:
    assert [f"I{n}" for n in range(1, 14)] == list(RULES)
    assert all(key == rule.id for key, rule in RULES.items())
