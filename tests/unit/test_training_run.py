"""Training runs: bits, replicas, going on from a file, skipped steps, and what defects do to them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends.cuda import CudaBackend
from qsim.errors import CaseError, InputError, StudyError, UsageError
from qsim.quant import OpId
from qsim.sim.data import Data
from qsim.training.config import QuantParams, TrainConfig
from qsim.training.join import joined
from qsim.training.log import TrainLog
from qsim.training.run import RunState, nodes_of, train, train_on
from qsim.training.saved import load_run, save_run
from tests.places import played_device
from tests.unit.training_cases import ALL, small

FP4 = QuantParams(linear=(), attention=("q", "k"))
CENTRED = QuantParams(linear=("input",), attention=("q", "k"), attention_recipe="centred", center_source="ema")


def norms(log: TrainLog) -> list[float]:
    return [step.grad_norm[0] for step in log.steps]


def test_a_run_in_parts_through_a_file_has_the_bits_of_a_run_in_one(tmp_path: Path) -> None:
    for quant in (ALL, CENTRED):
        whole = train_on(small(quant=quant, loop={"steps": 4}), (1, 2))
        config = small(quant=quant, loop={"steps": 2})
        first = train_on(config, (1, 2))
        save_run(tmp_path / "run", first.state, config=config, seeds=(1, 2))
        saved = load_run(tmp_path / "run")
        assert (config, (1, 2)) == (saved.config, saved.seeds)
        second = train_on(saved.config, saved.seeds, saved.state)
        steps = first.log.steps + second.log.steps
        assert [(s.loss, s.grad_norm) for s in whole.log.steps] == [(s.loss, s.grad_norm) for s in steps]
        assert_same_state(whole.state, second.state)


def assert_same_state(expected: RunState, actual: RunState) -> None:
    for name, value in expected.params.items():
        assert same_bits(value, actual.params[name]), name
    for name, moment in expected.held.m.items():
        assert same_bits(moment, actual.held.m[name]), name
    assert expected.states.keys() == actual.states.keys()
    for key, state in expected.states.items():
        other = actual.states[key]
        assert (state.epoch, state.last_commit) == (other.epoch, other.last_commit)
        assert all(same_bits(getattr(state, f), getattr(other, f)) for f in ("scale", "descale", "amax_history"))
        assert state.center is None or same_bits(state.center, other.center)


def test_a_run_that_goes_on_without_its_quantizer_states_is_another_run() -> None:
    config = small(quant=ALL, loop={"steps": 2})
    first = train_on(config, (1,))
    kept, lost = (
        train_on(config, (1,), msgspec_replace(first.state, states=states)).log for states in (first.state.states, {})
    )
    assert norms(kept) != norms(lost)


def msgspec_replace(state: RunState, **fields: Any) -> RunState:
    from dataclasses import replace

    return replace(state, **fields)


def test_what_is_no_run_is_refused_with_its_path(tmp_path: Path) -> None:
    config = small()
    state = train_on(config, (1,)).state
    save_run(tmp_path / "run", state, config=config, seeds=(1,))
    payload = (tmp_path / "run").read_bytes()
    (tmp_path / "cut").write_bytes(payload[:-100])
    for name in ("cut", "absent"):
        with pytest.raises(InputError, match=name):
            load_run(tmp_path / name)


@pytest.mark.parametrize("defect", ["correct", "D03", "D05"])
def test_the_bits_of_a_seed_depend_on_no_other_seed(defect: str) -> None:
    config = small(
        quant=ALL, defect=defect, model={"half": "float16"}, optimizer={"loss_scale": 1024.0, "dynamic": True}
    )
    together = train(config, (5, 6, 7))
    alone = [train(config, (seed,)) for seed in (5, 6, 7)]
    assert together.digest == tuple(log.digest[0] for log in alone)
    assert together.scales == joined(alone).scales
    assert [s.norm_by_kind for s in together.steps] == [s.norm_by_kind for s in joined(alone).steps]


def test_a_run_twice_is_the_same_and_another_seed_is_not() -> None:
    config = small(quant=ALL)
    assert train(config, (1,)).digest == train(config, (1,)).digest
    assert train(config, (1,)).digest != train(config, (2,)).digest


def test_workers_that_share_the_microbatches_add_the_same_gradients_in_another_order() -> None:
    config = {"loop": {"microbatches": 4}, "defect": "high_precision"}
    one = train(small(**config), (1,))
    two = train(small(**{**config, "loop": {"microbatches": 4, "workers": 2}}), (1,))
    np.testing.assert_allclose(norms(one), norms(two), rtol=1e-4)
    assert norms(one) != norms(two)  # float32 sums, and backward comes in another order
    assert one.steps[0].loss == two.steps[0].loss


def test_accumulated_gradients_are_the_mean_over_the_microbatches() -> None:
    batch = {"defect": "high_precision", "loop": {"steps": 1, "warm_steps": 0}}
    four = train(small(**{**batch, "loop": {"steps": 1, "warm_steps": 0, "microbatches": 4}}), (1,))
    parts = train(small(**batch), (1,))
    assert four.steps[0].tokens == 4 * parts.steps[0].tokens
    # Four microbatches of the same size: the step's gradient is smaller than the largest of any of them, not their sum.
    assert norms(four)[0] < 1.5 * norms(parts)[0]


def test_warm_steps_move_scales_and_leave_parameters_as_they_are() -> None:
    cold, warm = (train_on(small(quant=ALL, loop={"steps": 1, "warm_steps": w}), (1,)) for w in (0, 2))
    assert 1 == len(warm.log.steps)
    assert 0 == warm.log.steps[0].step
    assert warm.log.commits["L0/qkv/input"] == 3
    # The first step that counts sees the parameters of the start: without casts its loss is that of a cold run's step.
    plain = [
        train(small(defect="high_precision", loop={"first": first, "steps": 1, "warm_steps": w}), (1,))
        for first, w in ((2, 0), (0, 2))
    ]
    assert plain[0].steps[0].loss == plain[1].steps[0].loss
    assert cold.log.digest != warm.log.digest


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_changes_nothing() -> None:
    # float16 gradients of a loss scaled by 2^24 overflow; the scale backs off until they do not.
    config = small(
        defect="high_precision", model={"half": "float16"}, loop={"steps": 12, "warm_steps": 0},
        optimizer={"loss_scale": 2.0**24, "dynamic": True},
    )  # fmt: skip
    log = train(config, (1,))
    skipped = [step.skipped[0] for step in log.steps]
    assert skipped[0]
    assert not skipped[-1]
    assert all(math.isfinite(n) != s for n, s in zip(norms(log), skipped, strict=True))
    scales = [step.loss_scale[0] for step in log.steps]
    for at, (scale, gone) in enumerate(zip(scales[:-1], skipped[:-1], strict=True)):
        assert scales[at + 1] == (scale / 2 if gone else scale)
    assert {"gradient is inf", "gradient is nan"} >= {step.reason[0] for step in log.steps if step.skipped[0]}
    held = train_on(msgspec.structs.replace(config, loop=msgspec.structs.replace(config.loop, steps=1)), (1,))
    fresh = train_on(small(defect="high_precision", loop={"steps": 1, "warm_steps": 1}, optimizer={"lr": 0.0}), (1,))
    assert all(same_bits(held.state.params[name], value) for name, value in fresh.state.params.items())


def test_clipping_bounds_the_update_and_is_told() -> None:
    tight, loose = (train(small(defect="high_precision", optimizer={"clip": clip}), (1,)) for clip in (1e-3, 1e6))
    assert all(step.clipped[0] for step in tight.steps)
    assert not any(step.clipped[0] for step in loose.steps)


def test_forward_and_recompute_agree_at_every_matched_point_of_a_correct_run_alone() -> None:
    def differing(defect: str) -> int:
        log = train(small(quant=ALL, loop={"matched": (0, 2)}, defect=defect), (1,))
        assert 2 * 2 * 9 == len(log.matched)
        return sum(not all(point.same) for point in log.matched)

    assert 0 == differing("correct") == differing("high_precision")
    assert 0 < differing("D02")
    assert 0 < differing("D39")


def test_a_matched_point_says_scale_digest_and_distance() -> None:
    log = train(small(quant=ALL, loop={"matched": (0,)}, defect="D39"), (1,))
    points = {point.point: point for point in log.matched}
    product = points["m0.w0.L1.down"]
    assert not product.same[0]
    assert product.digest_forward != product.digest_recompute
    assert 0 < product.max_abs[0]
    assert 0 < product.max_rel[0] < 1
    assert 0 < product.amax_forward[0]
    assert product.scale_forward != product.scale_recompute
    assert points["m0.w0.L0.norm_attn"].same == (True,)
    assert points["m0.w0.L0.norm_attn"].scale_forward == (0.0,)


def test_telemetry_adds_up() -> None:
    log = train(small(quant=ALL), (1, 2))
    for step in log.steps:
        for replica in range(2):
            total = math.hypot(*(row[replica] for row in step.norm_by_layer.values()))
            assert math.isclose(total, step.grad_norm[replica], rel_tol=1e-12)
            kinds = math.hypot(*(row[replica] for row in step.norm_by_kind.values()))
            assert math.isclose(kinds, step.grad_norm[replica], rel_tol=1e-12)
        assert {"stem", "L0", "L1", "tail"} == set(step.norm_by_layer)
        assert {"embed", "positions", "norm", "qkv", "proj", "up", "down", "head"} == set(step.norm_by_kind)
        assert 16 == step.tokens
    assert 4 == log.commits["L0/qkv/input"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"data": {"spread": (1,)}}, "1 exponents for 2 layers"),
        ({"data": {"checkpoint": "builtin"}}, "does not fit the model"),
        ({"quant": {"linear": ("inputs",)}}, 'quant.linear "inputs" is unknown; known: input'),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises((StudyError, InputError), match=problem):
        train(small(**wrong), (1,))
    with pytest.raises(UsageError, match="without seeds"):
        train(small(), ())


REPORT = """
import json
from qsim.training.run import train
from tests.unit.training_cases import ALL, small
config = small(quant=ALL, model={"width": 32, "hidden": 48}, defect="D03", loop={"steps": 4})
print(json.dumps(train(config, (1, 2)).digest))
"""


def digest_under(**environment: str) -> list[str]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", REPORT], cwd=root, env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_digest_of_a_run_is_the_same_on_other_kernels_and_threads() -> None:
    plain = digest_under(OPENBLAS_NUM_THREADS="1")
    assert plain == digest_under(OPENBLAS_NUM_THREADS="2")
    assert plain == digest_under(OPENBLAS_CORETYPE="Haswell")
    assert plain == digest_under(OPENBLAS_CORETYPE="SkylakeX")
    without = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
    assert plain == digest_under(NPY_DISABLE_CPU_FEATURES=without)


def test_state_left_out_of_a_checkpoint_harms_the_run() -> None:
    """D33: after a restart the gradients are cast with a fresh scale, and most of them flush to zero."""

    def run(defect: str) -> TrainConfig:
        quant = QuantParams(
            linear=("input", "weight", "grad_output"), window=16, fmt="float4_e2m1fn", grad_fmt="float4_e2m1fn"
        )
        return small(quant=quant, loop={"steps": 4, "warm_steps": 0, "features": ("save_restore",)}, defect=defect)

    right, wrong = train(run("correct"), (1, 2, 3)), train(run("D33/not_loaded"), (1, 2, 3))
    assert ("I3", "I8") == wrong.broken
    assert right.steps[0].grad_norm == wrong.steps[0].grad_norm  # before the restart
    after = np.array(wrong.steps[1].grad_norm) / np.array(right.steps[1].grad_norm)
    assert np.all(np.abs(np.log2(after)) > 0.5)


TINY = {
    "model": {"layers": 1, "width": 8, "heads": 2, "hidden": 8, "context": 4},
    "data": {"batch": 1},
    "loop": {"steps": 2, "warm_steps": 1, "matched": (0,)},
}


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("backend", ["oracle", "emulated"])
def test_a_run_has_the_same_bits_on_every_backend(backend: str) -> None:
    for quant in (ALL, CENTRED):
        configs = [small(quant=quant, **TINY, defect="D03", backend=name) for name in ("numba", backend)]
        expected, found = (train(config, (1, 2)) for config in configs)
        assert expected.digest == found.digest
        assert expected.matched == found.matched


@pytest.mark.usefixtures("gpp")
def test_a_run_on_the_arrays_of_a_device_has_the_bits_of_one_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsim.backends.cuda.nvrtc_version", lambda: "played")
    backend = CudaBackend(played_device(monkeypatch))
    config = small(quant=ALL, **TINY, defect="D03")
    expected = train(config, (1, 2))
    monkeypatch.setattr("qsim.training.run.get_backend", lambda name: backend)
    found = train(config, (1, 2))
    assert expected.digest == found.digest
    assert expected.final_loss == found.final_loss


def test_the_gradient_of_split_is_its_transpose_where_keys_have_a_mean() -> None:
    nodes = nodes_of(small(model={"key_mean": 3.0}, accumulation="blas"))
    rng = np.random.default_rng(0)
    x, dq, dk, dv = (rng.normal(size=(1, 16, width)) for width in (48, 16, 16, 16))
    q, k, v = nodes.table()["split"](OpId(0), x)
    (dx,) = nodes.table()["split.backward"](OpId(0), dq, dk, dv)
    np.testing.assert_allclose((q * dq + k * dk + v * dv).sum(), (x * dx).sum(), rtol=1e-12)


def test_a_defect_that_needs_more_microbatches_is_the_run_of_more_microbatches() -> None:
    grown, told = train(small(defect="D26"), (1,)), train(small(defect="D26", loop={"microbatches": 2}), (1,))
    assert told.digest == grown.digest
    assert 32 == grown.steps[0].tokens
    with pytest.raises(CaseError, match=r"D04 shared_scope needs 2 layers: set model\.layers"):
        train(small(defect="D04", model={"layers": 1}), (1,))


def test_a_step_that_is_taken_back_is_logged_once_as_it_was_run_last() -> None:
    config = {"quant": ALL, "loop": {"steps": 3, "features": ("rerun",), "matched": (2,)}}
    again, once = train(small(**config), (1,)), train(small(quant=ALL, loop={"steps": 3, "matched": (2,)}), (1,))
    assert [0, 1, 2] == [step.step for step in again.steps]
    assert once.digest == again.digest
    assert once.matched == again.matched
    assert once.digest != train(small(**config, defect="D35"), (1,)).digest


def test_steps_of_a_run_that_goes_on_have_numbers_of_their_own() -> None:
    config = small(quant=ALL, loop={"steps": 2, "matched": (1,)})
    first = train_on(config, (1,))
    second = train_on(config, (1,), first.state)
    assert [0, 1, 2, 3] == [step.step for step in (*first.log.steps, *second.log.steps)]
    assert {1} == {point.step for point in first.log.matched}
    assert {3} == {point.step for point in second.log.matched}
    with pytest.raises(InputError, match=r"a run state for 2 seed\(s\) does not fit the model"):
        train_on(config, (1, 2), first.state)


def test_the_mail_of_ranks_is_empty_when_all_have_taken_it() -> None:
    config = small(quant=ALL, loop={"microbatches": 2, "workers": 2, "features": ("data_parallel",)})

    class Mail:
        left: int = 0

        def look(self, event: Any, data: Data) -> None:
            self.left = len(data.mail)

    mail = Mail()
    train_on(config, (1,), watch=(mail,))
    assert 0 == mail.left


def test_a_commit_in_the_wrong_place_and_workers_one_by_one_are_run_in_numbers_too() -> None:
    quant = {"quant": ALL, "loop": {"steps": 2, "microbatches": 4, "workers": 2}}
    correct = train(small(**quant), (1,))
    assert correct.digest != train(small(**quant, defect="D23"), (1,)).digest
    mended = train(small(**quant, defect="D08", fix="fail_closed_to_one_worker"), (1,))
    assert () == mended.broken == mended.expected


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"accumulation": "fast"}, 'accumulation "fast" is unknown; known: exact, blas, tf32'),
        ({"model": {"activation": "relu"}}, 'model.activation "relu" is unknown'),
        ({"model": {"heads": 3}}, "model.width 16 is no multiple of model.heads 3"),
        ({"loop": {"matched": (3,)}}, r"loop.matched \[3\] names a step outside 0..2"),
        ({"loop": {"warm_steps": -1}}, "loop.warm_steps -1 is too small"),
        ({"loop": {"steps": 5000}}, "layer visits .* are more than 5000 in one run"),
        ({"optimizer": {"loss_scale": 0.0}}, "optimizer.loss_scale 0.0 is outside"),
        ({"optimizer": {"loss_scale": 2.0**30, "dynamic": True}}, "is outside 1..2\\^24"),
        ({"data": {"checkpoint": "trained:0"}}, 'workload.checkpoint "trained:0": after trained: stands a number'),
        ({"defect": "D03+D03"}, 'protocol "D03\\+D03" puts a defect on twice'),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_before_it_does(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError, match=problem):
        train(small(**wrong), (1,))


def test_a_checkpoint_is_trained_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSIM_CACHE_DIR", str(tmp_path))
    config = small(defect="high_precision", data={"checkpoint": "trained:3"})
    first = train(config, (1,))
    (kept,) = (tmp_path / "weights").iterdir()
    stamp = kept.stat().st_mtime_ns
    assert first.digest == train(config, (1,)).digest
    assert stamp == kept.stat().st_mtime_ns
    other = train(small(defect="high_precision", data={"checkpoint": "trained:4"}), (1,))
    assert first.digest != other.digest
    assert 2 == len(list((tmp_path / "weights").iterdir()))
