"""What defects of state, workers, ranks and checkpoints do to numbers, by hand: scales from amaxes that are loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.quant import OpId, QuantSnapshot
from qsim.sim import DEFECTS, FIXES, PRESETS, Case, Feature, Linear, ScheduleSpec, Scores, Trace, build_case, judge, run
from tests.unit.sim_cases import POLICY, env_of, recipe_of, tensors

THREE = (Linear(0, True), Scores(1), Linear(2, True))
SEEDS = (0, 1)
LOAD = tensors(SEEDS)
MAX = np.float32(448)  # of e4m3
ONE = np.ones(2, np.float32)
WEIGHT, GRADIENT = 1, 2
CHANGED = {  # at window 1, three steps: the phases in which any output differs from the correct twin's
    "D06": "bfr",
    "D08": "bfr",
    "D09": "bfr",
    "D10": "bfr",  # nobody writes before all have read, so the second worker begins on the old state
    "D11": "bfr",
    "D12": "f",  # the codes of forward alone lie in the scratch buffer
    "D22": "bfr",
    "D23": "",  # late by a unit, but before the next cast of its owner: every begin finds the scale that is due
    "D24": "befr",
    "D25": "bfr",
    "D26": "bfr",
    "D27": "bfr",
    "D28": "",  # a window of 1 that holds a 0 keeps its scale, as one that skipped it does
    "D29": "bfr",  # the activation is an operand of the gradient of its weight
    "D30": "bfr",
    "D31": "bfr",
    "D32": "bfr",
    "D33": "bfr",
    "D34": "bfr",
    "D35": "bfr",
    "D36": "bfr",
    "D37": "",  # the second amax is the first: a window of 1 cannot tell
    "D38": "bfr",
}


def case_on(defect_id: str, *, steps: int = 3, window: int = 1, variant: str = "", layers: int = 0) -> Case:
    """The host that is minimal but for its steps; gradients in a format of their own."""
    defect = DEFECTS[defect_id]
    bare = replace(defect.minimal, features=frozenset()) if variant else defect.minimal
    spec = defect.host(replace(bare, steps=steps, layers=layers or bare.layers), variant)
    recipe = replace(recipe_of("delayed", window=window), grad_fmt=recipe_of("delayed", "e5m2").fmt)
    body = THREE if defect_id == "D36" else THREE[:2]
    return build_case(
        spec, body=body, preset=PRESETS["seed_correct"], recipe=recipe, cadence=defect.cadence, policy=POLICY
    )


def both(case: Case, defect_id: str, variant: str = "") -> tuple[Trace, Trace]:
    return run(case, env_of(case)), run(DEFECTS[defect_id].apply(case, variant), env_of(case))


def outputs(trace: Trace) -> dict[tuple, np.ndarray]:
    """By phase, operation and GEMM; of a step that is run twice, the second."""
    return {(r.phase, r.op, r.gemm): trace.outputs[r.seq] for r in trace.records if r.kind == "consume"}


def used(trace: Trace, op: OpId) -> QuantSnapshot:
    """What ``op`` was encoded with, the last time."""
    seqs = [r.seq for r in trace.records if r.kind == "quantize" and r.op == op and r.phase != "r"]
    return trace.casts[seqs[-1]].snapshot


def scale(trace: Trace, *at: int) -> np.ndarray:
    return used(trace, OpId(*at)).scale


def amax(*at: int) -> np.ndarray:
    return np.abs(LOAD(OpId(*at))).max(axis=(-2, -1))


def of(*amaxes: np.ndarray) -> np.ndarray:
    """The scale that these amaxes have, merged by max."""
    return MAX / np.maximum.reduce(amaxes)


def equal(expected: np.ndarray, actual: np.ndarray) -> bool:
    return same_bits(np.asarray(expected, np.float32), np.asarray(actual))


@pytest.mark.parametrize("name", CHANGED)
def test_outputs_differ_from_the_correct_twin_in_the_phases_that_the_row_says(name: str) -> None:
    correct, bad = map(outputs, both(case_on(name), name))
    assert correct.keys() == bad.keys()
    changed = {key[0] for key, out in correct.items() if not same_bits(out, bad[key])}
    assert CHANGED[name] == "".join(sorted(changed))


@pytest.mark.parametrize("name", CHANGED)
def test_a_fix_gives_back_the_bits_of_the_correct_twin(name: str) -> None:
    case = case_on(name, window=2, steps=4)
    wanted = outputs(run(case, env_of(case)))
    bad = DEFECTS[name].apply(case)
    for fix in DEFECTS[name].fixes:
        if fix == "per_worker_state" or (name == "D10" and fix in ("atomic_commit", "compare_and_set")):
            continue  # correct too, but another protocol: states of their own; workers that begin together
        got = outputs(run(FIXES[fix].rewrite(bad), env_of(case)))
        assert wanted.keys() == got.keys()
        assert all(same_bits(wanted[key], got[key]) for key in wanted), fix


@pytest.mark.parametrize("name", CHANGED)
def test_the_bits_of_a_replica_do_not_depend_on_the_others(name: str) -> None:
    case = DEFECTS[name].apply(case_on(name, steps=2))
    together = run(case, env_of(case, seeds=(5, 6)))
    for replica, seed in enumerate((5, 6)):
        alone = run(case, env_of(case, seeds=(seed,)))
        assert alone.records == together.records
        for seq, output in alone.outputs.items():
            assert same_bits(output[0], np.ascontiguousarray(together.outputs[seq][replica])), (seed, seq)


@pytest.mark.parametrize("name", ["D22", "D34", "D38"])
def test_a_state_that_never_moves_keeps_a_scale_of_one(name: str) -> None:
    correct, bad = both(case_on(name), name)
    for role in (0, WEIGHT, GRADIENT):
        assert equal(ONE, scale(bad, 2, 0, 0, 0, role))
    assert equal(of(amax(1, 0, 0, 0, 0)), scale(correct, 2, 0, 0, 0, 0))


def test_a_frozen_layer_keeps_its_own_scales_and_no_others() -> None:
    _, bad = both(case_on("D22", layers=2), "D22", "frozen_layer")
    assert equal(ONE, scale(bad, 1, 0, 0))
    assert equal(of(amax(0, 0, 1)), scale(bad, 1, 0, 1))


def test_activations_take_the_scale_of_a_gradient_where_roles_share_a_state() -> None:
    correct, bad = both(case_on("D06"), "D06")
    gradient = np.float32(57344) / amax(0, 0, 0, 0, GRADIENT)  # the last commit of step 0 was the gradient's, in e5m2
    assert equal(gradient, scale(bad, 1, 0, 0, 0, 0))
    assert equal(of(amax(0, 0, 0, 0, 0)), scale(correct, 1, 0, 0, 0, 0))


def test_a_torn_pair_encodes_with_the_new_scale_and_decodes_with_the_old_descale() -> None:
    _, bad = both(case_on("D08", steps=1), "D08")
    torn = used(bad, OpId(0, 1, 0, 0, 0, 1))
    assert equal(of(amax(0, 0, 0, 0, 0, 0)), torn.scale)  # worker 0's commit
    assert equal(ONE, torn.descale)  # of the initial state


@pytest.mark.parametrize("name", ["D11", "D30"])
def test_ranks_that_do_not_agree_scale_by_what_they_saw_themselves(name: str) -> None:
    correct, bad = both(case_on(name), name)
    own = [amax(0, w, 0, 0, 0, w) for w in range(2)]
    for w in range(2):
        assert equal(of(*own), scale(correct, 1, w, 0, 0, 0, w))
        assert equal(of(own[w]), scale(bad, 1, w, 0, 0, 0, w))


def test_two_streams_with_one_buffer_give_the_product_of_the_second_twice() -> None:
    correct, bad = map(outputs, both(case_on("D12", steps=1), "D12"))
    first, second = (("f", OpId(0, w, 0, 0, 0, w), "linear") for w in range(2))
    assert same_bits(correct[second], bad[second])
    assert same_bits(bad[second], bad[first])  # one epoch, so one descale: nothing else tells them apart
    assert not same_bits(correct[first], bad[first])


def test_a_commit_in_the_wrong_place_loses_a_unit_of_the_lower_layers_at_a_checkpoint() -> None:
    spec = replace(DEFECTS["D23"].minimal, steps=3, features=frozenset({Feature.SAVE_RESTORE}))
    case = build_case(spec, body=THREE[:2], preset=PRESETS["seed_correct"], recipe=recipe_of("delayed"), policy=POLICY)
    correct, bad = both(case, "D23")
    for layer, lost in ((0, ONE), (1, of(amax(0, 0, 1, 0, GRADIENT)))):  # the last layer commits in time
        assert equal(of(amax(0, 0, layer, 0, GRADIENT)), scale(correct, 1, 0, layer, 0, GRADIENT))
        assert equal(lost, scale(bad, 1, 0, layer, 0, GRADIENT))
        assert equal(of(amax(1, 0, layer, 0, GRADIENT)), scale(bad, 2, 0, layer, 0, GRADIENT))


@pytest.mark.parametrize("variant", ["", "calibration", "padding", "graph_capture"])
def test_the_amax_of_a_foreign_pass_enters_the_next_commit(variant: str) -> None:
    correct, bad = both(case_on("D24", variant=variant), "D24", variant)
    foreign, own = amax(0, 1, 0), amax(0, 0, 0)  # the pass has a microbatch of its own, behind those of training
    assert equal(of(foreign, own), scale(bad, 1, 0, 0))
    assert equal(of(own), scale(correct, 1, 0, 0))
    assert (foreign > own).any()


@pytest.mark.parametrize(
    ("name", "variant", "merged"),
    [
        ("D25", "", lambda a, b: b),
        ("D26", "", lambda a, b: a + b),
        ("D26", "mean", lambda a, b: (a + b) / np.float32(2)),
        ("D26", "clip", lambda a, b: np.minimum(np.maximum(a, b), np.float32(1))),
        ("D26", "decay", lambda a, b: np.maximum(a, b)),  # the window was empty: nothing to decay
    ],
)
def test_two_microbatches_merge_by_another_rule_than_max(name: str, variant: str, merged) -> None:
    correct, bad = both(case_on(name), name, variant)
    a, b = amax(0, 0, 0), amax(0, 1, 0)
    assert equal(MAX / merged(a, b), scale(bad, 1, 0, 0))
    assert equal(of(a, b), scale(correct, 1, 0, 0))
    if variant == "decay":
        later = np.maximum(np.maximum(amax(1, 0, 0), amax(1, 1, 0)), np.float32(0.5) * np.maximum(a, b))
        assert equal(MAX / later, scale(bad, 2, 0, 0))


def test_a_commit_a_microbatch_moves_the_scale_within_the_step_and_halves_the_window() -> None:
    correct, bad = both(case_on("D27", window=2), "D27")
    first, second = amax(0, 0, 0), amax(0, 1, 0)
    assert equal(of(first), scale(bad, 0, 1, 0))
    assert equal(ONE, scale(correct, 0, 1, 0))
    a, b = amax(1, 0, 0), amax(1, 1, 0)
    assert equal(of(a, b), scale(bad, 2, 0, 0))  # two entries are one step
    assert equal(of(first, second, a, b), scale(correct, 2, 0, 0))


def test_a_zero_shortens_the_window_and_explodes_where_an_eps_stands_for_it() -> None:
    correct, bad = both(case_on("D28", window=2, steps=5), "D28")
    assert equal(of(amax(2, 0, 0)), scale(bad, 4, 0, 0))  # steps 1 and 3 were idle: the window is (a2, 0)
    assert equal(of(amax(0, 0, 0), amax(2, 0, 0)), scale(correct, 4, 0, 0))
    _, clamped = both(case_on("D28"), "D28", "clamp")
    assert equal(MAX / np.full(2, 1e-12, np.float32), scale(clamped, 2, 0, 0))


def test_an_inf_freezes_the_scale_while_it_is_in_the_window() -> None:
    finite = np.abs(LOAD(OpId(0))).reshape(2, -1)[:, 1:].max(axis=-1)  # element 0 is the Inf
    correct, bad = both(case_on("D29"), "D29")
    assert equal(of(finite), scale(correct, 1, 0, 0))
    assert equal(ONE, scale(bad, 1, 0, 0))
    assert equal(of(amax(1, 0, 0)), scale(bad, 2, 0, 0))
    _, spread = both(case_on("D29"), "D29", "propagate")
    assert equal(np.zeros(2), scale(spread, 1, 0, 0))


def test_a_rank_that_is_left_out_never_moves_and_the_other_goes_on_alone() -> None:
    _, bad = both(case_on("D31"), "D31")
    assert equal(ONE, scale(bad, 2, 1, 0, 0, 0, 1))
    assert equal(of(amax(1, 0, 0)), scale(bad, 2, 0, 0))
    assert equal(of(amax(1, 0, 0, 0, WEIGHT)), scale(bad, 2, 1, 0, 0, WEIGHT, 1))  # its other states agree


def test_the_owner_of_a_weight_drifts_by_its_rounding_and_its_peers_do_not() -> None:
    case = case_on("D32")
    trace, bad = both(case, "D32")
    correct, changed = outputs(trace), outputs(bad)
    same = {key: same_bits(out, changed[key]) for key, out in correct.items()}
    weights = ("linear", "dgrad")
    assert all(ok for (_, op, gemm), ok in same.items() if op[5] == 1 or gemm not in weights)
    assert not any(ok for (_, op, gemm), ok in same.items() if op[5] == 0 and gemm in weights)
    env, at = env_of(case), OpId(1)
    seq = next(r.seq for r in bad.records if r.kind == "quantize" and r.op == at)
    cast = bad.casts[seq]
    product = env.gemm("linear", env.decode(cast, cast.snapshot, None), LOAD(at._replace(role_id=WEIGHT)))
    assert same_bits(product, changed["f", at, "linear"])


def test_weights_that_are_cast_before_the_load_have_the_scale_of_a_new_process_for_one_step() -> None:
    correct, bad = both(case_on("D33"), "D33")
    assert equal(ONE, scale(bad, 1, 0, 0, 0, WEIGHT))
    assert equal(of(amax(0, 0, 0, 0, WEIGHT)), scale(correct, 1, 0, 0, 0, WEIGHT))
    assert equal(of(amax(1, 0, 0, 0, WEIGHT)), scale(bad, 2, 0, 0, 0, WEIGHT))


def test_what_a_checkpoint_gives_back_is_what_was_read_of_it() -> None:
    due = of(amax(0, 0, 0))
    for variant, expected in (("descale", (due, ONE)), ("not_loaded", (ONE, ONE)), ("state_left_out", (ONE, ONE))):
        _, bad = both(case_on("D33", variant=variant, steps=2, layers=2), "D33", variant)
        got = used(bad, OpId(1))
        assert equal(expected[0], got.scale)
        assert equal(expected[1], got.descale)
        other = of(amax(0, 0, 1)) if variant != "not_loaded" else ONE
        assert equal(other, scale(bad, 1, 0, 1))


def test_a_rerun_without_rollback_encodes_with_its_own_first_run() -> None:
    correct, bad = both(case_on("D35", steps=2), "D35")
    assert equal(of(amax(0, 0, 0)), scale(correct, 1, 0, 0))
    assert equal(of(amax(1, 0, 0)), scale(bad, 1, 0, 0))


def test_two_sites_under_one_key_take_the_scale_of_whichever_came_last() -> None:
    correct, bad = both(case_on("D36"), "D36")
    assert equal(of(amax(0, 0, 0, 2)), scale(bad, 1, 0, 0, 0))
    assert equal(of(amax(0, 0, 0, 0)), scale(correct, 1, 0, 0, 0))
    assert equal(of(amax(1, 0, 0, 0)), scale(bad, 1, 0, 0, 2))  # site 0 of the same step
    assert Feature.MIXED_FORMATS in DEFECTS["D36"].minimal.features


def test_a_second_layout_halves_the_window() -> None:
    correct, bad = both(case_on("D37", window=2), "D37")
    assert equal(of(amax(1, 0, 0)), scale(bad, 2, 0, 0))
    assert equal(of(amax(0, 0, 0), amax(1, 0, 0)), scale(correct, 2, 0, 0))
    assert (amax(0, 0, 0) > amax(1, 0, 0)).any()


def test_a_small_host_is_all_that_a_trace_needs() -> None:
    assert ScheduleSpec(steps=1, layers=1) == DEFECTS["D22"].minimal == DEFECTS["D37"].minimal


def test_a_commit_that_was_missing_comes_at_the_end_of_its_step_not_before_the_recompute() -> None:
    # torchao's recompute reads the live state: a commit right behind the last observation would come too early
    spec = ScheduleSpec(steps=3, layers=1)
    case = build_case(
        spec, body=THREE[:2], preset=PRESETS["torchao_delayed"], recipe=recipe_of("delayed"), policy=POLICY
    )
    mended = FIXES["commit_every_unit"].rewrite(DEFECTS["D22"].apply(case))
    assert () == judge(mended)
    wanted, got = (outputs(run(one, env_of(case))) for one in (case, mended))
    assert wanted.keys() == got.keys()
    assert all(same_bits(wanted[key], got[key]) for key in wanted)
