"""Defects of timing and identity, by numbers: which bits differ from the correct twin's, and fixes restore them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends import get_backend
from qsim.errors import UsageError
from qsim.formats import RoundMode
from qsim.quant import OpId, TensorRole
from qsim.severity import replay_mismatch
from qsim.sim import DEFECTS, FIXES, Case, Env, Trace, run
from tests.unit.defect_cases_a import FIXED_BY, SHAPES, host_of
from tests.unit.sim_cases import POLICY, env_of, tensors


def outputs(trace: Trace, keep: Callable[[str, OpId, str], bool] = lambda *_: True) -> list[np.ndarray]:
    """The outputs of the consumers that ``keep`` (phase, op, gemm) names, in one order whatever that of events."""
    kept = [r for r in trace.records if r.kind == "consume" and keep(r.phase, OpId(*r.op), r.gemm)]
    return [trace.outputs[r.seq] for r in sorted(kept, key=lambda r: (r.phase, r.gemm, r.op, r.seq))]


def differing(correct: Trace, bad: Trace, keep: Callable[[str, OpId, str], bool] = lambda *_: True) -> tuple[int, int]:
    """How many outputs differ in any bit, of how many."""
    pairs = list(zip(outputs(correct, keep), outputs(bad, keep), strict=True))
    return sum(not same_bits(a, b) for a, b in pairs), len(pairs)


def both(shape: tuple[str, str], **grown) -> tuple[Case, Trace, Trace]:
    case = host_of(shape, **grown)
    bad = DEFECTS[shape[0]].apply(case, shape[1])
    return bad, run(case, env_of(case)), run(bad, env_of(bad))


@pytest.mark.parametrize(
    ("shape", "recomputed"),
    [  # outputs of recompute that differ from the correct twin, of all; of D13 by backward alone in site 0's weights
        (("D13", ""), (4, 4)),
        (("D17", ""), (4, 4)),
        (("D17", "entered_twice"), (0, 4)),
        (("D18", ""), (0, 2)),
        (("D18", "after_commit"), (2, 2)),
        (("D19", ""), (0, 1)),
        (("D21", ""), (2, 2)),
        (("D21", "precision"), (2, 2)),
        (("D39", ""), (2, 2)),
        (("D40", ""), (0, 2)),
        (("D41", ""), (0, 2)),  # nearest rounding draws nothing
    ],
    ids=str,
)
def test_forward_keeps_its_bits_and_recompute_gets_others_where_the_story_says_so(
    shape: tuple[str, str], recomputed: tuple[int, int]
) -> None:
    _, correct, bad = both(shape)
    assert 0 == differing(correct, bad, lambda phase, *_: phase == "f")[0]
    assert recomputed == differing(correct, bad, lambda phase, *_: phase == "r")


def test_a_live_read_in_backward_is_off_by_the_ratio_of_two_descales() -> None:
    case = host_of(("D13", ""), recipe="delayed")
    bad = DEFECTS["D13"].apply(case)
    good_trace, bad_trace = run(case, env_of(case)), run(bad, env_of(bad))
    for trace in (good_trace, bad_trace):
        assert len(trace.outputs) == 2 * (2 + 2 + 2)
    for record in bad_trace.records:
        if record.kind == "consume" and record.gemm == "scores" and record.phase == "r":
            (left, right), (own, its) = (
                bad_trace.used[record.seq],
                [bad_trace.casts[u.cast].snapshot for u in bad_trace.used[record.seq]],
            )
            ratio = (left.descale.descale.astype(np.float64) / own.descale) * (right.descale.descale / its.descale)
            same = next(
                good_trace.outputs[r.seq]
                for r in good_trace.records
                if r.kind == "consume" and (r.phase, r.gemm, r.op) == ("r", "scores", record.op)
            )
            np.testing.assert_allclose(bad_trace.outputs[record.seq], same * ratio[:, None, None], rtol=1e-5)
            assert (np.abs(ratio - 1) > 0.01).all()


def test_a_cached_weight_is_right_in_its_own_gemm_and_off_in_every_hit() -> None:
    _, correct, bad = both(("D14", ""), microbatches=3)
    assert (0, 1) == differing(correct, bad, lambda phase, op, gemm: (phase, gemm, op.microbatch) == ("f", "linear", 0))
    assert (2, 2) == differing(
        correct, bad, lambda phase, op, gemm: (phase, gemm) == ("f", "linear") and op.microbatch > 0
    )
    assert (3, 3) == differing(correct, bad, lambda phase, op, gemm: (phase, gemm) == ("r", "linear"))
    assert (3, 3) == differing(correct, bad, lambda phase, op, gemm: gemm == "dgrad")
    assert (0, 3) == differing(correct, bad, lambda phase, op, gemm: gemm == "wgrad")


def moving(case: Case) -> Env:
    """Weights that an optimizer has moved by one twentieth of themselves a step, each element its own way."""
    still = tensors((0, 1))

    def load(op: OpId) -> np.ndarray:
        x = still(op)
        if op.role_id != TensorRole.WEIGHT:
            return x
        way = np.where(np.arange(x[0].size).reshape(x[0].shape) % 2, 1, -1)
        return (x * (1 + 0.05 * op.logical_step * way)).astype(np.float32)

    return replace(env_of(case), load=load)


def test_a_stale_cache_is_right_in_the_first_step_and_drifts_with_the_weights() -> None:
    case = host_of(("D15", ""), steps=5, recipe="delayed")
    bad = DEFECTS["D15"].apply(case)
    correct, stale = run(case, moving(case)), run(bad, moving(case))
    errors = []
    for step in range(5):
        a, b = (
            outputs(t, lambda p, op, g, step=step: g == "linear" and op.logical_step == step)[0]
            for t in (correct, stale)
        )
        errors.append(float(np.linalg.norm(b - a) / np.linalg.norm(a)))
    assert 0 == errors[0]
    assert errors == sorted(errors)
    assert errors[4] > 0.1
    mended = run(FIXES["refill_cache"].rewrite(bad), moving(case))
    assert (0, 30) == differing(correct, mended)


@pytest.mark.parametrize(("fmt", "nan"), [("e4m3", True), ("e5m2", True), ("e2m1", False)])
def test_an_unfilled_cache_gives_nan_in_fp8_and_large_numbers_in_fp4(fmt: str, nan: bool) -> None:
    _, correct, bad = both(("D16", ""), fmt=fmt)
    own, hits = (
        (lambda p, op, g: (p, g, op.microbatch) == ("f", "linear", 0)),
        (lambda p, op, g: (p, g, op.microbatch) == ("f", "linear", 1)),
    )
    assert (0, 1) == differing(correct, bad, own)
    assert (1, 1) == differing(correct, bad, hits)
    assert nan == bool(np.isnan(outputs(bad, hits)[0]).all())
    assert not any(np.isnan(x).any() for x in outputs(correct))


def test_a_lucky_restore_is_the_value_of_forward_until_somebody_commits() -> None:
    for variant, mismatch in (("", 0.0), ("after_commit", 1.0)):
        bad, _, trace = both(("D18", variant), steps=3)
        assert mismatch == replay_mismatch(trace).mean()
        assert not replay_mismatch(run(FIXES["paired_stash"].rewrite(bad), env_of(bad))).any()


def test_two_commits_of_one_amax_halve_the_window_and_leave_every_pass_paired() -> None:
    short = both(("D20", ""), steps=8, window=1, recipe="delayed")
    assert 0 == differing(short[1], short[2])[0]  # a window of one entry holds it once or twice alike
    _, correct, bad = both(("D20", ""), steps=8, window=4, recipe="delayed")
    assert differing(correct, bad, lambda phase, *_: phase == "f")[0] > 0
    assert not replay_mismatch(bad).any()
    history = [r for r in bad.records if r.kind == "commit" and r.phase == "r" and r.op[3:5] == (0, 0)]
    assert 2 * 8 == len(history)


def test_recompute_in_another_context_casts_to_another_format_or_not_at_all() -> None:
    _, correct, drifted = both(("D21", ""))
    names = {drifted.casts[r.seq].snapshot.fmt.name for r in drifted.records if r.kind == "quantize" and r.phase == "r"}
    assert {"float8_e5m2"} == names
    _, _, plain = both(("D21", "precision"))
    assert not [r for r in plain.records if r.kind == "quantize" and r.phase == "r" and r.seq in plain.casts]
    linear = next(r for r in plain.records if r.kind == "consume" and (r.phase, r.gemm) == ("r", "linear"))
    load, matmul = tensors((0, 1)), get_backend("oracle").matmul
    x, w = load(OpId(0)), load(OpId(0, role_id=int(TensorRole.WEIGHT)))
    assert same_bits(matmul(x, w), plain.outputs[linear.seq])
    assert correct.outputs.keys() == plain.outputs.keys()


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_every_fix_gives_back_the_bits_of_the_correct_twin(shape: tuple[str, str]) -> None:
    case = host_of(
        shape, steps=3, layers=2, microbatches=max(2, DEFECTS[shape[0]].shaped(shape[1]).minimal.microbatches)
    )
    case = (
        case if shape[0] != "D20" else host_of(shape, steps=3, layers=2)
    )  # one merged commit comes after all forwards
    bad = DEFECTS[shape[0]].apply(case, shape[1])
    correct = run(case, moving(case))
    for name in FIXED_BY[shape]:
        mended = run(FIXES[name].rewrite(bad), moving(case))
        assert 0 == differing(correct, mended)[0], name


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_the_bits_of_a_replica_do_not_depend_on_the_others(shape: tuple[str, str]) -> None:
    bad = DEFECTS[shape[0]].apply(host_of(shape, window=2), shape[1])
    together = run(bad, env_of(bad, seeds=(5, 6, 7)))
    for replica, seed in enumerate((5, 6, 7)):
        alone = run(bad, env_of(bad, seeds=(seed,)))
        for seq, output in alone.outputs.items():
            assert same_bits(output[0], np.ascontiguousarray(together.outputs[seq][replica])), (seed, seq)


# ---- stochastic rounding ---------------------------------------------------------------------------------------

STOCHASTIC = replace(POLICY, rounding=RoundMode.STOCHASTIC)


def drawing(case: Case, *, seeds: tuple[int, ...] = (0, 1), backend: str = "numba") -> Env:
    return replace(env_of(case, seeds=seeds, backend=backend), policy=STOCHASTIC, seeds=seeds)


def test_recompute_draws_the_words_of_forward_and_a_fresh_draw_gives_other_codes() -> None:
    case = host_of(("D41", ""), steps=2, layers=2)
    bad = DEFECTS["D41"].apply(case)
    correct, drawn = run(case, drawing(case)), run(bad, drawing(case))
    assert not replay_mismatch(correct).any()
    assert replay_mismatch(drawn).all()
    assert 0 == differing(correct, drawn, lambda phase, *_: phase == "f")[0]
    assert 0 == differing(correct, run(FIXES["same_context"].rewrite(bad), drawing(case)))[0]
    assert replay_mismatch(run(FIXES["keyed_snapshot"].rewrite(bad), drawing(case))).all()


def test_random_words_of_a_replica_are_those_of_its_seed_on_every_backend() -> None:
    case = host_of(("D41", ""))
    bad = DEFECTS["D41"].apply(case)
    together = run(bad, drawing(bad, seeds=(3, 4)))
    for replica, seed in enumerate((3, 4)):
        for backend in ("oracle", "numba"):
            alone = run(bad, drawing(bad, seeds=(seed,), backend=backend))
            for seq, cast in alone.casts.items():
                assert same_bits(cast.codes[0], np.ascontiguousarray(together.casts[seq].codes[replica])), (
                    backend,
                    seq,
                )


def test_fresh_words_are_no_neighbours_words() -> None:
    env = drawing(host_of(("D41", "")), seeds=(0, 1))
    words = [tuple(stream.words(8)) for bits in (0, 1, 2) for stream in env.words(OpId(0), bits)]
    assert 6 == len(set(words))
    assert tuple(OpId(0).stream(1).words(8)) == words[1]


def test_an_env_takes_one_seed_a_replica_and_none_where_nothing_is_drawn() -> None:
    env = env_of(host_of(("D41", "")))
    with pytest.raises(UsageError, match=r"0 seed\(s\) for 2 replica\(s\)"):
        replace(env, policy=STOCHASTIC)
    with pytest.raises(UsageError, match=r"2 seed\(s\) for 2 replica\(s\)"):
        replace(env, seeds=(0, 1))
