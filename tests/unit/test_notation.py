"""The notation of schedules: what is written is read back, and what cannot be read says where and why."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsim.errors import CaseError, StudyError
from qsim.formats import POLICIES
from qsim.quant import ANY, MergeRule, NonFiniteRule, OpId, StateKey, ZeroRule
from qsim.sim import (
    CONTRASTS,
    DEFECTS,
    PRESETS,
    Cadence,
    Case,
    Feature,
    Order,
    ScheduleSpec,
    broken,
    correct_twin,
    high_precision_twin,
    judge,
)
from qsim.sim.events import (
    Allocate,
    Begin,
    Commit,
    Consume,
    Content,
    Drop,
    Fetch,
    Fold,
    Group,
    Load,
    LoadState,
    Mode,
    Observe,
    Operand,
    Optimize,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restart,
    Restore,
    SaveState,
    Stash,
    Store,
    Take,
    Wait,
)
from qsim.sim.notation import SIGNS, Declared, NotationError, declared_by, read_schedule, write_schedule
from qsim.sim.scopes import LAYER_WORKER, MODEL
from tests.unit.sim_cases import THREE, WITH_GRADIENTS, case_of, recipe_of

A = OpId(0)
W = A._replace(role_id=1)
F = Phase.FORWARD


def spec_with(order: Order, *features: Feature) -> ScheduleSpec:
    workers = 2 if set(features) & {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL} else 1
    small = order is not Order.INTERLEAVED
    return ScheduleSpec(
        steps=2,
        layers=2 if small else 4,
        microbatches=2 if small else 4,
        workers=workers,
        order=order,
        features=frozenset(features),
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("order", Order)
def test_every_built_schedule_is_read_back_as_it_was_written(preset: str, order: Order) -> None:
    recipe = recipe_of("current" if preset == "current" else "centred")
    built = 0
    for feature in (None, *Feature):
        spec = spec_with(order, *([feature] if feature else []))
        try:
            case = case_of(recipe, spec=spec, preset=preset, body=WITH_GRADIENTS)
        except CaseError:  # ranks and a preset that is defective by itself
            assert preset == "seed_defective"
            continue
        declared = declared_by(case.context)
        assert (case.schedule, declared) == read_schedule(write_schedule(case.schedule, declared))
        built += 1
    assert built >= len(Feature) - 1


@pytest.mark.parametrize("name", [*DEFECTS, *CONTRASTS])
def test_every_rewritten_schedule_is_read_back_as_it_was_written(name: str) -> None:
    defect = {**DEFECTS, **CONTRASTS}[name]
    case = defect.apply(case_of(recipe_of("centred"), defect=defect, body=THREE))
    declared = declared_by(case.context, defect.breaks)
    assert (case.schedule, declared) == read_schedule(write_schedule(case.schedule, declared))


SLOTS = st.one_of(
    st.sampled_from(["snap/m0/w0/L0/s0/r0", "snap/m00/w0/L0/s0/r0", "codes.r/m3/w1/L-2/s9/r7/v2", "a b", "~snap",
                     "x/m0/w0/L0/s0/r0/v0", "cache/m0/w0/L0/s0/r1", "-", "", 'say "so"', "back\\slash", "hash # sign",
                     "a+b", "a,b", "(", "]", "|", ":", "ünï", "tab\tline\nend"]),
    st.text(max_size=8),
)  # fmt: skip
OPS = st.builds(OpId, *[st.integers(0, 3)] * 3, *[st.integers(0, 6)] * 2, *[st.integers(0, 2)] * 2)
CELLS = st.builds(StateKey, *[st.integers(-1, 5)] * 4, st.integers(0, 2))
MAYBE = st.none() | SLOTS
MANY = st.lists(SLOTS, max_size=3).map(tuple)
PHASES = st.sampled_from(Phase)
FOLDS = st.builds(Fold, st.sampled_from(MergeRule), st.sampled_from(ZeroRule), st.sampled_from(NonFiniteRule),
                  st.none() | st.floats(0.01, 1e30))  # fmt: skip
MODES = st.builds(Mode, st.booleans(), SLOTS, st.booleans(), st.booleans(), st.booleans(), SLOTS, st.integers(-2, 9),
                  st.none() | PHASES)  # fmt: skip
OPERANDS = st.builds(Operand, OPS, SLOTS, MAYBE, MAYBE, MAYBE, st.booleans())
GROUPS = st.builds(Group, SLOTS, st.integers(0, 9))
EVENTS = st.one_of(
    st.builds(Load, PHASES, OPS, SLOTS, st.sampled_from(Content)),
    st.builds(Begin, PHASES, OPS, CELLS, SLOTS, MAYBE),
    st.builds(Quantize, PHASES, OPS, SLOTS, SLOTS, SLOTS, MODES),
    st.builds(Observe, PHASES, OPS, SLOTS, MAYBE, SLOTS),
    st.builds(Commit, PHASES, OPS, CELLS, MANY, FOLDS),
    st.builds(Fetch, PHASES, OPS, CELLS, SLOTS),
    st.builds(Store, PHASES, OPS, CELLS, SLOTS, MANY, FOLDS, st.sampled_from(Part)),
    st.builds(Consume, PHASES, OPS, SLOTS, st.tuples(OPERANDS, OPERANDS), SLOTS),
    st.builds(Stash, PHASES, OPS, SLOTS, SLOTS),
    st.builds(Restore, PHASES, OPS, SLOTS, SLOTS, st.sampled_from(Take), CELLS),
    st.builds(Reduce, PHASES, OPS, GROUPS, SLOTS),
    st.builds(Wait, PHASES, OPS, GROUPS, SLOTS),
    st.builds(Optimize, PHASES, OPS),
    st.builds(SaveState, PHASES, st.lists(CELLS, max_size=3).map(tuple), SLOTS),
    st.builds(Restart, PHASES, MANY),
    st.builds(LoadState, PHASES, SLOTS, MANY),
    st.builds(Allocate, PHASES, OPS, MANY),
    st.builds(Drop, PHASES, MANY),
)
DECLARED = st.builds(
    Declared, scope=st.sampled_from([MODEL, LAYER_WORKER]), unit=st.sampled_from(Cadence), ranks=st.integers(1, 9),
    fold=FOLDS, breaks=st.frozensets(st.sampled_from(["I1", "I12"])),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=6).map(tuple), DECLARED)
def test_any_events_whatever_their_names_are_read_back(schedule, declared) -> None:
    assert (schedule, declared) == read_schedule(write_schedule(schedule, declared))


def test_every_event_has_a_sign_of_its_own() -> None:
    letters = [sign.letters for sign in SIGNS]
    assert len(set(letters)) == len(letters) == 19


def test_a_line_says_only_what_is_unusual() -> None:
    read = read_schedule(
        "declare fold=max/roll/latch   # a comment\n\n"
        "f t2 m1 w1 L3.ffn_up.input v1: X(empty) P(obs=~obs.f) Q(mode=off+fmt:float8_e5m2)\n"
        "f L0.qkv.input: C(cell=L*.*.input/w1!2, obs=~obs.f+~obs.f@m1) | weight/m1: F\n"
    )
    op = OpId(2, 1, 3, 2, 0, 1, 1)
    name = "/m1/w1/L3/s2/r0/v1"
    fold = Fold(zero=ZeroRule.ROLL)
    other = StateKey(ANY, ANY, 0, 1, 2)
    assert (
        Load(F, op, "x" + name, Content.EMPTY),
        Begin(F, op, StateKey(3, 2, 0), "snap" + name, "obs.f" + name),
        Quantize(F, op, "x" + name, "snap" + name, "codes.f" + name, Mode(enabled=False, fmt="float8_e5m2")),
        Commit(F, A, other, ("obs.f/m0/w0/L0/s0/r0", "obs.f/m1/w0/L0/s0/r0"), fold),
        Fetch(F, W._replace(microbatch=1), StateKey(0, 0, 1), "live/m1/w0/L0/s0/r1"),
    ) == read.schedule
    assert fold == read.declared.fold


def test_an_operand_says_where_its_metadata_comes_from() -> None:
    (plain, live, torn, cached, raw) = read_schedule(
        "f: U\n"
        "r: U(linear, input[by=~live center], weight)\n"
        "b: U(wgrad, input[descale=~live version=~snap], grad_output)\n"
        "f m2: U(linear, input, weight/m0[cached])\n"
        "f: U(scores, attn_q[raw], attn_k[raw], out=here)\n"
    ).schedule
    a, w = "/m0/w0/L0/s0/r0", "/m0/w0/L0/s0/r1"
    assert Operand(A, "codes.f" + a, "snap" + a, None, "snap" + a) == plain.operands[0]
    assert "out.f.linear" + a == plain.out
    assert Operand(A, "codes.r" + a, "live" + a, "live" + a, "live" + a) == live.operands[0]
    assert Operand(A, "codes.b" + a, "live" + a, None, "snap" + a) == torn.operands[0]
    assert Operand(W, "cache" + w, "cache.snap" + w, None, "cache.snap" + w, True) == cached.operands[1]
    q = A._replace(role_id=3)
    assert Operand(q, "x/m0/w0/L0/s0/r3", None, None, None) == raw.operands[0]
    assert ("scores", "here") == (raw.gemm, raw.out)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1, column 1: found no event; write a line like"),
        ("f t0: X\n\ng t0: X", 'line 3, column 1: found "g"; allowed: f, r, b, u, e, cal, cap, pad'),
        ("f t0: X Z", 'line 1, column 9: found "Z"; allowed signs: X, P, Q'),
        ("f t0 X", 'line 1, column 1: found "f t0 X" without ":"'),
        ("f t0 q9: X", 'line 1, column 6: found "q9" in "q9"; allowed: t0 m0 w0 v0'),
        ("f t0 t1: X", 'line 1, column 6: "t1" gives logical_step a second time'),
        ("f L0.qkv.inptu: X", 'line 1, column 3: found "inptu" in "L0.qkv.inptu"'),
        ("f:", "line 1, column 3: found no sign"),
        ("f: X |: X", 'line 1, column 7: found no operation before ":"'),
        ("f: X | weight: X | weight", 'line 1, column 20: found "weight" without ":"'),
        ("f: Q(srx=~x)", 'line 1, column 6: found "srx=~x"; Q takes src=, by=, out=, mode='),
        ("f: Q(by=~x, by=~y)", 'line 1, column 13: "by" is given a second time'),
        ("f: Q(by=~9)", 'line 1, column 6: "~9" is no slot; write ~snap'),
        ("f: Q(by=a b)", 'line 1, column 6: "a b" is no name; give letters'),
        ("f: X(full)", 'line 1, column 6: found "full"; allowed: normal, empty, nonfinite'),
        ("f: X(empty, 3)", 'line 1, column 13: found "3"; X takes content, out='),
        ("f: V(stack)", 'found "stack"; allowed: keyed, fifo, lifo'),
        ("f: OPT(1)", "column 8: found \"1\"; OPT takes no argument"),
        ("f: R", "line 1, column 4: R lacks group: a group, like g:2"),
        ("f: R(g)", 'line 1, column 6: "g" is no group'),
        ("f: R(g:two)", '"two" is no whole number'),
        ("f: C(fold=max/roll)", '"max/roll" is no fold'),
        ("f: C(fold=sum/roll/latch/x)", '"x" is no amount'),
        ("f: C(fold=min/roll/latch)", 'found "min"; allowed: max'),
        ("f: P(cell=L0)", '"L0" is no owner; write L0.qkv.input'),
        ("f: Q(mode=slow)", 'found "slow"; allowed in mode'),
        ("f: U(linear, input[by=~live", 'line 1, column 19: this bracket has no "]"'),
        ("f: U(linear, input[of=a])", 'found "of=a"; allowed in an operand'),
        ("f: U(linear, input[raw cached])", 'found "raw"; allowed in an operand'),
        ("f: X)", 'line 1, column 5: found ")", which closes nothing'),
        ('f: X(out="a)', "line 1, column 10: these quotes do not end"),
        ("f: X(out=a)P", "line 1, column 12: found text right after a bracket"),
        ("f: X\ndeclare unit=step", 'line 2, column 1: "declare" must stand on the first line'),
        ("declare unit=week", 'line 1, column 9: found "week"; allowed: microbatch, step, never'),
        ("declare scope=all", 'found "all"; allowed: layer, layer_worker, model'),
        ("declare ranks=0", "found 0 ranks; allowed: 1 to 65536"),
        ("declare breaks=I1+I99", 'found "I99"; allowed: I1, I2'),
        ("declare hello", 'line 1, column 9: found "hello"; allowed: scope=, unit=, ranks=, fold=, breaks='),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_where_what_was_found_and_what_is_allowed(text: str, problem: str) -> None:
    with pytest.raises(NotationError) as caught:
        read_schedule(text)
    assert problem in caught.value.problems[0]
    assert 1 == len(caught.value.problems)
    assert isinstance(caught.value, StudyError)


def test_every_faulty_line_is_told_and_a_flood_is_cut() -> None:
    with pytest.raises(NotationError) as caught:
        read_schedule("f: X\n" + "f: Z\n" * 3 + "f: X\n")
    assert ["line 2", "line 3", "line 4"] == [problem.split(",")[0] for problem in caught.value.problems]
    with pytest.raises(NotationError) as caught:
        read_schedule("f: Z\n" * 50)
    assert (21, "... and 30 more") == (len(caught.value.problems), caught.value.problems[-1])


def test_a_text_is_never_run() -> None:
    with pytest.raises(NotationError):
        read_schedule("f: __import__('os')")


def written_case(text: str) -> Case:
    read = read_schedule(text)
    return Case(
        schedule=read.schedule, recipe=recipe_of("delayed"), policy=POLICIES["ocp"], context=read.declared.context()
    )


LATE = (
    "f t0 L0.qkv.input: X P Q O C F | weight: X P Q O C F | input: U(linear, input[by=~live], weight[by=~live])\n"
    "r t0 L0.qkv.input: X Q | weight: X Q | input: U\n"
)


def test_the_twin_of_a_written_schedule_keeps_its_gemms_and_breaks_nothing() -> None:
    case = written_case(LATE)
    assert {"I1"} == set(broken(judge(case)))
    twin, plain = correct_twin(case), high_precision_twin(case)
    gemms = [[(e.phase, e.op, e.gemm) for e in c.schedule if isinstance(e, Consume)] for c in (case, twin, plain)]
    assert gemms[0] == gemms[1] == gemms[2]
    assert () == judge(twin) == judge(plain)
    assert 2 == sum(isinstance(e, Commit) for e in twin.schedule)
    assert {Load, Consume, Drop} == {type(e) for e in plain.schedule}


@pytest.mark.parametrize(("unit", "due"), [(Cadence.STEP, 4), (Cadence.MICROBATCH, 8), (Cadence.NEVER, 0)])
def test_the_twin_commits_once_an_owner_and_unit(unit: Cadence, due: int) -> None:
    lines = [f"{phase} t{t} m{m}: X Q | weight: X Q | input: U" for t in range(2) for phase in "fr" for m in range(2)]
    case = written_case("\n".join(line.replace("X Q", "X P Q") if line[0] == "f" else line for line in lines))
    twin = correct_twin(dataclasses.replace(case, context=dataclasses.replace(case.context, unit=unit)))
    assert due == sum(isinstance(e, Commit) for e in twin.schedule)
    assert () == judge(twin)


@pytest.mark.parametrize(
    ("preset", "features"), list(itertools.product(["te_fused", "flax"], [(), (Feature.NESTED,), (Feature.TWICE,)]))
)
def test_the_twin_of_any_built_schedule_is_correct(preset: str, features: tuple[Feature, ...]) -> None:
    case = case_of(
        recipe_of("delayed"), spec=spec_with(Order.FORWARD_FIRST, *features), preset=preset, body=WITH_GRADIENTS
    )
    assert () == judge(correct_twin(case))


def test_an_equals_sign_within_quotes_is_no_key() -> None:
    (load,) = read_schedule('u: LD("a=b", parts=state)').schedule
    assert LoadState(Phase.UPDATE, "a=b", ("state",)) == load
