"""Each preset: the order of its events, and the scales it uses on a stream of amaxes worked out by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from qsim.backends import get_backend
from qsim.formats import POLICIES
from qsim.quant import OpId, TensorRole
from qsim.sim import PRESETS, Env, Feature, Linear, Order, ScheduleSpec, Trace, broken, build_case, judge, run
from qsim.sim.events import Begin, Commit, Consume, Fetch, Observe, Phase, Quantize, Restore, Stash
from qsim.sim.schedule import GROUPS
from tests.unit.sim_cases import THREE, recipe_of

BODY_OF_ONE = (Linear(0),)
WINDOW = 2
AMAXES = (4.0, 1.0, 0.0, 8.0, 2.0, 2.0)  # of step 0, 1, ...; E4M3's largest number is 448
LETTERS = {
    Begin: "P", Quantize: "Q", Observe: "O", Commit: "C", Consume: "U", Fetch: "F", Stash: "push", Restore: "pop",
}  # fmt: skip

# preset: events of the input in forward and in recompute; scale that forward encodes with, step by step
HAND = {
    # window (4): 112, (4 1): 112, a 0 does not move it, (1 8): 56, (8 2): 56
    "seed_correct": ("P Q O C U", "Q U", [1, 112, 112, 112, 56, 56]),
    # every amax enters twice: (4 4), (1 1): 448, (8 8), (2 2): 224
    "seed_defective": ("P Q O C F U", "P Q O C F U", [1, 112, 448, 448, 56, 224]),
    # the same window, committed when forward leaves its region
    "te_fused": ("P push Q O U C", "pop Q U", [1, 112, 112, 112, 56, 56]),
    # a 0 enters: (1 0): 448
    "te_unfused": ("P push Q O U C", "pop Q U", [1, 112, 112, 448, 56, 56]),
    # the first scale is of the first tensor; recompute reads the live state, which waits for the call
    "torchao_delayed": ("O P Q U", "O P Q U", [112, 112, 112, 448, 56, 56]),
    # what is used is of the window before the tensor in hand, as in te_unfused
    "flax": ("P Q O U", "Q U", [1, 112, 112, 448, 56, 56]),
    "te_jax": ("P Q O C U", "Q U", [1, 112, 112, 448, 56, 56]),
    # powers of two, of the tensor in hand until two commits are in: 112 -> 64, 448 -> 256; then (4 1), a 0 stays out
    "msamp": ("O P Q C U", "Q U", [64, 256, 64, 64, 32, 32]),
    # always of the tensor in hand; 1 where its amax is 0
    "current": ("O P Q U", "Q U", [112, 448, 1, 56, 224, 224]),
    "none": ("U", "U", []),
}
COMMITTED_LATER = {"torchao_delayed": "u", "flax": "u"}


def play(name: str) -> tuple[Trace, list[object]]:
    spec = ScheduleSpec(steps=len(AMAXES), layers=1)
    recipe = recipe_of("current") if name == "current" else recipe_of("delayed", window=WINDOW)
    case = build_case(spec, body=BODY_OF_ONE, preset=PRESETS[name], recipe=recipe)

    def load(op: OpId) -> np.ndarray:
        if op.role_id == TensorRole.WEIGHT:
            return np.ones((1, 2, 2), np.float32)
        return np.full((1, 3, 2), AMAXES[op.logical_step], np.float32)

    env = Env(load=load, backend=get_backend("numba"), recipe=case.recipe, policy=POLICIES["ocp"], lead=(1,))
    return run(case, env), list(case.schedule)


def test_the_table_below_names_every_preset() -> None:
    assert set(HAND) == set(PRESETS)


@pytest.mark.parametrize("name", HAND)
def test_a_preset_orders_the_events_of_an_input_as_its_system_does(name: str) -> None:
    _, schedule = play(name)
    forward, again, _ = HAND[name]

    def of(phase: Phase) -> str:
        mine = [
            e
            for e in schedule
            if type(e) in LETTERS and e.phase is phase and e.op.logical_step == 1 and e.op.role_id == TensorRole.INPUT
        ]
        return " ".join(LETTERS[type(e)] for e in mine)

    assert forward == of(Phase.FORWARD)
    assert again == of(Phase.RECOMPUTE)
    commits = [e.phase.value for e in schedule if isinstance(e, Commit) and e.op.role_id == TensorRole.INPUT]
    if name in COMMITTED_LATER:
        assert [COMMITTED_LATER[name]] * len(AMAXES) == commits


@pytest.mark.parametrize("name", HAND)
def test_the_scales_of_forward_are_those_worked_out_by_hand(name: str) -> None:
    trace, _ = play(name)
    used = [
        float(trace.casts[r.seq].snapshot.scale[0])
        for r in trace.records
        if r.kind == "quantize" and r.phase == "f" and r.op[4] == TensorRole.INPUT
    ]
    assert HAND[name][2] == used


@pytest.mark.parametrize("name", [n for n in HAND if n not in ("seed_defective", "none")])
def test_recompute_encodes_with_the_scale_of_forward(name: str) -> None:
    trace, _ = play(name)
    scales: dict[str, list[float]] = {"f": [], "r": []}
    for r in trace.records:
        if r.kind == "quantize" and r.op[4] == TensorRole.INPUT:
            scales[r.phase].append(float(trace.casts[r.seq].snapshot.scale[0]))
    assert HAND[name][2] == scales["f"] == scales["r"]


def families() -> list[ScheduleSpec]:
    """Every order with each feature alone, with one microbatch and with four, and 60 pairs of features drawn once."""
    pairs = list(itertools.combinations(Feature, 2))
    drawn = random.Random(6).sample(list(itertools.product(Order, pairs)), 60)
    chosen = [(o, fs) for o in Order for fs in [(), *((f,) for f in Feature)]] + drawn
    found = []
    for order, features in chosen:
        group = [set(features) >= {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL}]
        workers = 2 if any("parallel" in f for f in features) else 1
        if any(group) or exclusive(features):
            continue
        found.append(
            ScheduleSpec(
                steps=2, microbatches=2 * workers, layers=4, workers=workers, order=order, features=frozenset(features)
            )
        )
    found += [
        ScheduleSpec(steps=2, microbatches=m, layers=4, workers=2, order=o)
        for m in (2, 4)
        for o in Order
        if m > 2 or o is not Order.INTERLEAVED
    ]
    single = [replace(s, microbatches=s.workers) for s in found if s.order is not Order.INTERLEAVED]
    return found + single[:40]


def exclusive(features: tuple[Feature, ...]) -> bool:
    return any(sum(f in group for f in features) > 1 for _, group in GROUPS)


FAMILIES = families()


@pytest.mark.parametrize("name", [n for n in HAND if n != "seed_defective"])
def test_a_preset_breaks_on_every_family_of_schedules_what_its_literal_says_and_no_more(name: str) -> None:
    recipe = recipe_of("current") if name == "current" else recipe_of("delayed", window=WINDOW)
    assert len(FAMILIES) > 150
    for spec in FAMILIES:
        case = build_case(spec, body=THREE, preset=PRESETS[name], recipe=recipe)
        assert PRESETS[name].breaks_on(case.context.traits) == broken(judge(case)), spec


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n].faults])
def test_every_fault_of_a_preset_can_be_seen(name: str) -> None:
    for fault in PRESETS[name].faults:
        shown = [s for s in FAMILIES if fault.on(s.traits() | {"weights"})]
        assert shown, fault
