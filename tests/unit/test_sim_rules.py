"""The rules beyond one cast: ranks, checkpoints, caches, stashes, algebra, liveness, contexts. Records by hand."""

from __future__ import annotations

import pytest

from qsim.quant import OpId
from qsim.record import FoldRecord, ModeRecord, OperandRecord, Record, Saved, Seen, Version
from qsim.sim import Cadence, broken, check
from qsim.sim.scopes import LAYER, LAYER_WORKER

OP, NEXT = OpId(0), OpId(0, 1)
OWNER = str(LAYER(OP))
WEIGHT = OpId(0, role_id=1)
WEIGHTS = str(LAYER(WEIGHT))


def verdict(*records: Record, scope=LAYER, unit: Cadence = Cadence.MICROBATCH, ranks: int = 1) -> set[str]:
    numbered = [record._replace(seq=i) for i, record in enumerate(records)]
    return set(broken(check(numbered, scope=scope, unit=unit, ranks=ranks)))


def reasons(*records: Record, **declared) -> list[str]:
    numbered = [record._replace(seq=i) for i, record in enumerate(records)]
    options = {"scope": LAYER, "unit": Cadence.MICROBATCH, **declared}
    return [v.because for v in check(numbered, **options)]


def observe(op: OpId, phase: str = "f", content: str = "") -> Record:
    return Record(0, "observe", phase, op, content=content)


def commit(op: OpId, epoch: int, *seen: Seen, owner: str = "", **more) -> Record:
    return Record(0, "commit", "f", op, owner or str(LAYER(op)), epoch, epoch + 1, seen=seen, **more)


def saw(op: OpId, phase: str = "f", content: str = "") -> Seen:
    return Seen(op, phase, content)


# ---- I6 replica agreement --------------------------------------------------------------------------------------

R0, R1 = OpId(0, 0, worker_id=0), OpId(0, 1, worker_id=1)
LATER = [op._replace(microbatch=op.microbatch + 2) for op in (R0, R1)]


def ranks(first: tuple[Seen, ...], second: tuple[Seen, ...]) -> list[Record]:
    owners = [str(LAYER_WORKER(op)) for op in (R0, R1)]
    return [
        observe(R0),
        observe(R1),
        commit(R0, 0, *first, owner=owners[0]),
        commit(R1, 0, *second, owner=owners[1]),
    ]


BOTH = (saw(R0), saw(R1))


@pytest.mark.parametrize(
    ("expected", "first", "second"),
    [
        (set(), BOTH, BOTH),
        (set(), BOTH, BOTH[::-1]),
        ({"I6"}, BOTH, (saw(R1),)),
        ({"I6"}, (saw(R0),), (saw(R1),)),
        ({"I5", "I6"}, BOTH, (saw(R0),)),  # what a rank saw itself is missing
        ({"I5"}, (*BOTH, saw(OpId(7))), (*BOTH, saw(OpId(7)))),  # alike, and both fold in what is not of the group
    ],
)
def test_ranks_agree_where_they_fold_in_the_same_observations(expected, first, second) -> None:
    assert expected == verdict(*ranks(first, second), scope=LAYER_WORKER, ranks=2)


def test_workers_that_are_no_ranks_need_not_agree() -> None:
    assert set() == verdict(*ranks((saw(R0),), (saw(R1),)), scope=LAYER_WORKER)


def test_the_second_microbatch_of_a_rank_is_compared_with_the_second_of_the_other() -> None:
    owners = [str(LAYER_WORKER(op)) for op in (R0, R1)]
    more = tuple(map(saw, LATER))
    second = [observe(op) for op in LATER] + [
        commit(op, 1, *more, owner=owner) for op, owner in zip(LATER, owners, strict=True)
    ]
    assert set() == verdict(*ranks(BOTH, BOTH), *second, scope=LAYER_WORKER, ranks=2)


def test_a_weight_that_one_rank_decodes_and_another_does_not_breaks_replica_agreement() -> None:
    def product(op: OpId, *, cast: bool) -> Record:
        version = Version(str(LAYER_WORKER(op)), 0, op)
        operand = OperandRecord(op, op, version, version, None, version)
        raw = OperandRecord(op, None, None, None, None, None)
        return Record(0, "consume", "f", op, operands=(operand if cast else raw,), gemm="linear")

    ops = [op._replace(role_id=1) for op in (R0, R1)]
    for kinds, expected in (((True, True), set()), ((False, False), set()), ((False, True), {"I6"})):
        records = [product(op, cast=cast) for op, cast in zip(ops, kinds, strict=True)]
        assert expected == verdict(*records, scope=LAYER_WORKER, ranks=2)


# ---- I7 atomic read --------------------------------------------------------------------------------------------


def test_a_torn_pair_breaks_atomic_read_and_not_pairing() -> None:
    torn = Version(OWNER, 2, OP, descale=1)
    operand = OperandRecord(OP, OP, torn, torn, None, torn)
    begin = Record(0, "begin", "f", OP, OWNER, 2, 2, torn)
    assert {"I7"} == verdict(begin, Record(0, "consume", "f", OP, operands=(operand,), gemm="linear"))


def test_codes_of_one_cast_under_the_metadata_of_another_break_atomic_read() -> None:
    mine, other = Version(OWNER, 0, OP), Version(OWNER, 0, NEXT)
    operand = OperandRecord(OP, OP, other, mine, None, mine)
    assert {"I7"} == verdict(Record(0, "consume", "f", OP, operands=(operand,), gemm="linear"))
    live = Version(OWNER, 0, None)  # a live read was frozen for nobody
    assert set() == verdict(
        Record(0, "consume", "f", OP, operands=(operand._replace(descale=live, version=live),), gemm="linear")
    )


# ---- I8 persistence --------------------------------------------------------------------------------------------

SAVED = (Saved(OWNER, 1, 1),)
SAVE = Record(0, "save", "u", None, saved=SAVED, weights=1)
RESTART = Record(0, "restart", "u", None)
LOADED = Record(0, "restore_state", "u", None, saved=SAVED, now=SAVED, weights=1, weights_due=1)
BEGIN = Record(0, "begin", "f", OpId(1), OWNER, 1, 1, Version(OWNER, 1, OpId(1)))


@pytest.mark.parametrize(
    ("expected", "records"),
    [
        (set(), [SAVE, RESTART, LOADED, BEGIN]),
        ({"I8"}, [SAVE, RESTART, LOADED._replace(now=(Saved(OWNER, 1, 0),)), BEGIN]),
        ({"I8"}, [SAVE, RESTART, LOADED._replace(now=(Saved(OWNER, 0, 1),)), BEGIN]),
        ({"I8"}, [SAVE, RESTART, LOADED._replace(weights=0), BEGIN]),
        ({"I8"}, [SAVE, RESTART, LOADED._replace(pending=2), BEGIN]),
        ({"I8"}, [SAVE, RESTART, BEGIN]),
        ({"I8"}, [commit(WEIGHT, 0), SAVE, RESTART, LOADED, BEGIN]),
    ],
)
def test_what_is_read_back_is_what_was_saved(expected: set[str], records: list[Record]) -> None:
    assert expected == verdict(*records) - {"I5"}  # the commit that only makes an epoch folds in nothing


def test_a_state_that_is_taken_back_may_be_committed_again_and_one_that_is_not_may_not() -> None:
    seen = saw(OP)
    before = [observe(OP), SAVE._replace(saved=(Saved(OWNER, 0, 0),)), commit(OP, 0, seen)]
    back = LOADED._replace(saved=(Saved(OWNER, 0, 0),), now=(Saved(OWNER, 0, 0),))
    assert set() == verdict(*before, back, commit(OP, 0, seen))
    assert {"I3"} == verdict(*before, commit(OP, 1, seen))


# ---- I9 cache validity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (set(), {}),
        ({"I9"}, {"weights": 0}),
        ({"I9"}, {"codes_op": None, "codes": None}),
        ({"I1", "I9"}, {"descale": Version(WEIGHTS, 1, None), "version": Version(WEIGHTS, 1, None)}),
        (set(), {"weights": 0, "cached": False}),
    ],
)
def test_a_cached_cast_is_of_the_live_weights_and_carries_its_own_descale(expected, changes) -> None:
    version = Version(WEIGHTS, 0, WEIGHT)
    operand = OperandRecord(WEIGHT, WEIGHT, version, version, None, version, cached=True, weights=1)._replace(**changes)
    assert expected == verdict(Record(0, "consume", "f", OP, operands=(operand,), gemm="linear", weights=1))


# ---- I10 stash discipline --------------------------------------------------------------------------------------


def push(op: OpId) -> Record:
    return Record(0, "stash", "f", op, queue="q", got=op)


def pop(op: OpId, got: OpId | None) -> Record:
    return Record(0, "restore", "r", op, queue="q", got=got)


@pytest.mark.parametrize(
    ("count", "records"),
    [
        (0, [push(OP), push(NEXT), pop(OP, OP), pop(NEXT, NEXT)]),
        (0, [push(OP), pop(OP, OP), push(OpId(1)), pop(OpId(1), OpId(1))]),
        (2, [push(OP), push(NEXT), pop(NEXT, OP), pop(OP, NEXT)]),
        (1, [push(OP), push(NEXT), pop(OP, OP)]),
        (1, [pop(OP, None)]),
        (1, [push(OP), push(OpId(1)), pop(OpId(1), OpId(1))]),
        (0, [push(OP), RESTART]),
    ],
)
def test_a_stash_is_taken_once_by_its_own_operation_in_its_own_step(count: int, records: list[Record]) -> None:
    assert ({"I10"} if count else set()) == verdict(*records)
    assert count == len(reasons(*records))


def test_each_worker_ends_its_own_step() -> None:
    ahead = OpId(1, worker_id=1)
    assert set() == verdict(push(OP), push(ahead), pop(ahead, ahead), pop(OP, OP))
    assert {"I10"} == verdict(push(OP), push(OpId(1)), pop(OpId(1), OpId(1)), pop(OP, OP))


# ---- I4 ownership ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["begin", "fetch", "store", "commit"])
def test_no_event_acts_on_the_state_of_another_owner(kind: str) -> None:
    foreign = str(LAYER(OP._replace(layer_id=1)))
    base = Version(foreign, 0, None) if kind == "store" else None
    moved = kind in ("store", "commit")
    record = Record(0, kind, "f", OP, foreign, 0, 1 if moved else 0, base, seen=(saw(OP),) if moved else ())
    assert {"I4"} == verdict(observe(OP), commit(OP, 0, saw(OP)), record) - {"I3"}


def test_neither_an_encode_nor_a_decode_takes_the_state_of_another_owner() -> None:
    foreign = Version(str(LAYER(OP._replace(layer_id=1))), 0, OP)
    assert {"I4"} == verdict(Record(0, "quantize", "f", OP, used=foreign))
    operand = OperandRecord(OP, OP, foreign, foreign, None, foreign)
    assert {"I4"} == verdict(Record(0, "consume", "f", OP, operands=(operand,), gemm="linear"))


def test_a_violation_names_the_events_that_are_involved() -> None:
    version, live = Version(OWNER, 0, OP), Version(OWNER, 1, None)
    cast = Record(0, "quantize", "f", OP, used=version)
    operand = OperandRecord(OP, OP, version, live, None, live)
    records = [cast, cast, commit(OP, 0), Record(0, "consume", "f", OP, operands=(operand,), gemm="linear")]
    numbered = [record._replace(seq=i) for i, record in enumerate(records)]
    found = {v.invariant: v.events for v in check(numbered, scope=LAYER, unit=Cadence.MICROBATCH)}
    assert (1, 3) == found["I1"]  # the last cast of the codes, and their consumer
    again = [*numbered[:3], commit(OP, 1)._replace(seq=3)]
    twice = {v.invariant: v.events for v in check(again, scope=LAYER, unit=Cadence.MICROBATCH)}
    assert (2, 3) == twice["I3"]  # both commits of the unit


# ---- I11 algebra, I12 liveness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sum", "mean", "clip", "decay"])
def test_amaxes_merge_by_max_and_by_nothing_else(rule: str) -> None:
    assert {"I11"} == verdict(observe(OP), commit(OP, 0, saw(OP), fold=FoldRecord(merge=rule)))
    assert set() == verdict(observe(OP), commit(OP, 0, saw(OP), fold=FoldRecord(merge="max")))


@pytest.mark.parametrize(
    ("expected", "rule"),
    [({"I12"}, "latch"), ({"I12"}, "propagate"), ({"I12"}, "invert"), (set(), "finite"), (set(), "skip")],
)
def test_an_inf_may_not_enter_the_window(expected: set[str], rule: str) -> None:
    records = [observe(OP, content="nonfinite"), commit(OP, 0, saw(OP, content="nonfinite"))]
    records[1] = records[1]._replace(fold=FoldRecord(nonfinite=rule))
    assert expected == verdict(*records)


@pytest.mark.parametrize(("expected", "rule"), [(set(), "skip"), ({"I5"}, "roll"), ({"I5"}, "clamp")])
def test_a_tensor_without_tokens_is_no_observation_of_a_unit(expected: set[str], rule: str) -> None:
    first = [observe(OP), commit(OP, 0, saw(OP))]
    empty = [observe(NEXT, content="empty"), commit(NEXT, 1, saw(NEXT, content="empty"))]
    empty[1] = empty[1]._replace(fold=FoldRecord(zero=rule))
    assert expected == verdict(*first, *empty)


def test_an_owner_whose_commits_go_to_a_copy_never_moves() -> None:
    records = [observe(OP), commit(OP, 0, saw(OP), storage=1)]
    assert {"I12"} == verdict(*records)
    assert "its commits go to a copy that nobody reads" in reasons(*records)[0]


def reduced(op: OpId, kind: str, size: int = 2) -> Record:
    return Record(0, kind, "f", op, group="g", size=size)


@pytest.mark.parametrize(
    ("expected", "records"),
    [
        (set(), [reduced(R0, "reduce"), reduced(R1, "reduce"), reduced(R0, "wait"), reduced(R1, "wait")]),
        ({"I12"}, [reduced(R0, "reduce"), reduced(R0, "wait")]),
        ({"I12"}, [reduced(R0, "reduce"), reduced(R1, "reduce"), reduced(R0, "wait"), reduced(R1, "wait", 1)]),
        (set(), [reduced(R0, "reduce", 1), reduced(R0, "wait", 1)] * 2),
    ],
)
def test_a_reduction_is_of_all_that_it_waits_for(expected: set[str], records: list[Record]) -> None:
    assert expected == verdict(*records, scope=LAYER_WORKER, ranks=2)


# ---- I2, I13 contexts ------------------------------------------------------------------------------------------


def quantize(phase: str, **mode) -> Record:
    return Record(0, "quantize", phase, OP, used=Version(OWNER, 0, OP), mode=ModeRecord(**mode) if mode else None)


@pytest.mark.parametrize(
    ("expected", "forward", "again"),
    [
        (set(), {}, {}),
        (set(), {"fmt": "float8_e5m2"}, {"fmt": "float8_e5m2"}),
        ({"I13"}, {}, {"fmt": "float8_e5m2"}),
        ({"I13"}, {}, {"enabled": False}),
        ({"I13"}, {"grad": False}, {}),
        ({"I13"}, {}, {"train": False}),
        ({"I13"}, {"cache": True}, {}),
        ({"I13"}, {"group": "a"}, {"group": "b"}),
        ({"I2", "I13"}, {}, {"bits": 1}),
        ({"I13"}, {}, {"detected": "f"}),
        (set(), {"detected": "f"}, {"detected": "r"}),
    ],
)
def test_recompute_runs_in_the_context_of_forward(expected: set[str], forward, again) -> None:
    assert expected == verdict(quantize("f", **forward), quantize("r", **again))


def test_recompute_is_compared_with_the_forward_before_it_and_not_with_a_later_one() -> None:
    later = [record._replace(used=Version(OWNER, 1, OP)) for record in (quantize("f"), quantize("r"))]
    assert set() == verdict(quantize("f"), quantize("r"), *later)
    assert {"I2"} == verdict(quantize("f"), later[0], quantize("r"))
