"""The backends of the CUDA texts through the public doors: any recipe, any product, the bits of the CPU."""

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import qsim
from cuda_kernels import DeviceMemoryError
from qsim.backends import CastSpec, get_backend
from qsim.backends.cuda import CudaBackend
from qsim.backends.emulated import EmulatedBackend
from qsim.codec.scaled import SCALE_RECIPES
from qsim.errors import BackendError, FormatError, UsageError
from qsim.formats import FORMATS, POLICIES
from qsim.gemm import Epilogue
from qsim.gemm.centred import centred_input_gradient, centred_matmul, centred_weight_gradient
from qsim.quant.products import scaled_gemm_with_report
from tests.backends import EACH, EMULATED
from tests.places import played_device

NUMBA = get_backend("numba")


def drawn(shape, seed, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


@EMULATED
@pytest.mark.parametrize("recipe", SCALE_RECIPES)
def test_quantize_and_dequantize_have_the_bits_of_the_cpu(backend, recipe):
    x = drawn((3, 5, 70), len(recipe))
    x[0, 0, :40] = 0
    x[1, 2, 3], x[2, 4, 60:62] = 1e30, (np.nan, -np.inf)
    for options in ({}, {"axis": 0}, {"center": "channel", "counts": True}, {"center": "token"}):
        expected = qsim.quantize(x, recipe, **options)
        got = qsim.quantize(x, recipe, backend=backend, **options)
        assert expected.same_bits(got), options
        assert (expected.amax.tobytes(), expected.counts) == (got.amax.tobytes(), got.counts)
        assert qsim.dequantize(expected).tobytes() == qsim.dequantize(got, backend=backend).tobytes()


@EMULATED
@pytest.mark.parametrize("recipe", ["e2m1", "mxfp4_rceil", "nvfp4_te", "nvfp4_4over6"])
def test_packed_rotated_and_stochastic_casts_have_the_bits_of_the_cpu(backend, recipe):
    x, signs = drawn((4, 64), 3), qsim.hadamard_signs(5)
    for options in (
        {"packed": True, "hadamard": signs},
        {"packed": True, "rounding": "stochastic", "stream": qsim.RandomStream(seed=9, step=2)},
        {"packed": True, "order": "high_first"},
    ):
        expected, got = (qsim.quantize(x, recipe, backend=b, **options) for b in ("numba", backend))
        assert expected.same_bits(got), options
        assert qsim.dequantize(expected).tobytes() == qsim.dequantize(got, backend=backend).tobytes()


@EMULATED
def test_what_is_refused_is_refused_in_the_same_words(backend):
    x = drawn((4, 40), 1)
    x[2, 7] = np.nan
    for recipe in ("e4m3_row", "mxfp8_floor", "nvfp4_te"):
        with pytest.raises(FormatError) as expected:
            qsim.quantize(x, recipe, nan="raise")
        with pytest.raises(FormatError) as got:
            qsim.quantize(x, recipe, nan="raise", backend=backend)
        assert str(expected.value) == str(got.value)


PAIRS = [("e2m1", "e2m1"), ("e2m1_row", "e2m1_row"), ("e4m3", "e5m2"), ("e4m3_1x128", "e4m3_128x128"),
         ("mxfp4_even", "mxfp4_rceil"), ("nvfp4_te", "nvfp4_te_16x16"), ("nvfp4_exact", "mxfp4_floor"),
         ("e5m2", "e5m2"), ("mxfp8_rceil", "nvfp4_torchao")]  # fmt: skip
EPILOGUES = {
    "plain": (Epilogue(), "float32"),
    "bias": (Epilogue(alpha=0.37, bias=np.arange(6, dtype=np.float32)), "bfloat16"),
    "beta": (Epilogue(beta=-1.5, c=np.full((5, 6), 0.3, np.float32)), "float16"),
    "codes": (Epilogue(scale_d=3.0), "e4m3"),
}


def both(backend, a, b, **options):
    expected = scaled_gemm_with_report(a, b, **options)
    got = scaled_gemm_with_report(a, b, backend=backend, **options)
    assert expected.d.dtype == got.d.dtype
    assert expected.d.tobytes() == got.d.tobytes()
    assert expected.y.tobytes() == got.y.tobytes()
    assert expected.amax == got.amax
    return got.report


@EMULATED
@pytest.mark.parametrize("how", ["exact", "exact_per_block"])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_exact_products_and_their_epilogues_have_the_bits_of_the_cpu(backend, names, how):
    a, b = qsim.quantize(drawn((5, 70), 1), names[0]), qsim.quantize(drawn((70, 6), 2), names[1], axis=0)
    for epilogue, out in EPILOGUES.values():
        report = both(backend, a, b, accumulate=how, epilogue=epilogue, out_dtype=out)
    fp4 = all("e2m1" in name or "fp4" in name for name in names)
    plain = not any("fp4" in name for name in names)
    assert ("INT8 tensor cores" in report.path) == (fp4 and (how == "exact_per_block") != plain)


@EMULATED
@pytest.mark.parametrize("order", ["product", "rows_first", "columns_first"])
def test_orders_of_factors_have_the_bits_of_the_cpu(backend, order):
    a, b = qsim.quantize(drawn((5, 70), 1), "e4m3_row"), qsim.quantize(drawn((70, 6), 2), "e4m3_col", axis=0)
    both(backend, a, b, epilogue=Epilogue(order=order, alpha=1.7))


MODELS = {"hopper_wgmma": ("e4m3", "e5m2"), "hopper_mma_sync": ("e5m2", "e4m3"), "ada_mma_sync": ("e4m3", "e4m3"),
          "blackwell_mma_sync": ("e4m3", "e4m3")}  # fmt: skip


def has(backend, model):
    return backend.name == "emulated" or backend.xp.__name__ == "numpy" or model in ("hopper_wgmma", "hopper_mma_sync")


@EMULATED
@pytest.mark.parametrize("model", MODELS)
def test_tensor_cores_have_the_bits_of_their_models(backend, model):
    if not has(backend, model):
        one = qsim.quantize(np.ones((1, 32), np.float32), "e4m3")
        with pytest.raises(UsageError, match=r"that model is of sm_\w+ and this device is sm_90a"):
            qsim.scaled_gemm(one, one, accumulate=model, transpose_b=True, backend=backend)
        return
    names = MODELS[model]
    a, b = qsim.quantize(drawn((5, 300), 1), names[0]), qsim.quantize(drawn((300, 6), 2), names[1], axis=0)
    for options in ({}, {"promote_every": 128}, {"split_k": 3}, {"promote_every": 64, "split_k": 2}):
        report = both(backend, a, b, accumulate=model, **options)
        assert report.path.startswith(f"model {model}, by ")
    a = qsim.quantize(drawn((5, 300), 1), f"{names[0]}_1x128")
    b = qsim.quantize(drawn((300, 6), 2), f"{names[1]}_128x128", axis=0)
    both(backend, a, b, accumulate=model)
    both(backend, a, qsim.quantize(drawn((300, 6), 2), names[1], axis=0), accumulate=model, promote_every=64)
    mx = qsim.quantize(drawn((5, 300), 1), "mxfp8_rceil"), qsim.quantize(drawn((300, 6), 2), "mxfp8_floor", axis=0)
    both(backend, *mx, accumulate=model)


@EMULATED
def test_a_model_without_a_kernel_and_wrong_options_are_named(backend):
    a, b = qsim.quantize(drawn((5, 64), 1), "e4m3"), qsim.quantize(drawn((64, 6), 2), "e4m3", axis=0)
    for options, message in (
        (
            {"accumulate": "blackwell_tcgen05"},
            r"model blackwell_tcgen05 has no kernel; .* bits of hopper",
        ),
        ({"accumulate": "hopper_wgmma", "promote_every": 48}, "promote_every 48 cuts an instruction"),
        ({"accumulate": "int8"}, "model int8 multiplies int8"),
        ({"accumulate": "exact", "split_k": 2}, "'exact' has no chains"),
        ({"accumulate": "hopper"}, "accumulate 'hopper' is unknown"),
    ):
        with pytest.raises(UsageError, match=message):
            qsim.scaled_gemm(a, b, backend=backend, **options)
    with pytest.raises(FormatError, match="rounds beyond"):
        qsim.scaled_gemm(
            a, b, backend=backend, out_dtype="e4m3", epilogue=Epilogue(scale_d=1e6, overflow="raise")
        )  # fmt: skip


@EMULATED
@pytest.mark.parametrize("center", ["tensor", "channel", "token", "block"])
def test_centred_products_have_the_bits_of_the_cpu(backend, center):
    a = qsim.quantize(drawn((5, 64), 1) + np.float32(2), "nvfp4_te", center=center)
    b = qsim.quantize(drawn((64, 6), 2), "nvfp4_te", axis=0, center="channel")
    both(backend, a, b, epilogue=Epilogue(alpha=0.5))


@EMULATED
@pytest.mark.parametrize(("axis", "shape"), [("channel", (1, 20)), ("token", (7, 1)), ("block", (7, 3))])
def test_centred_gradients_have_the_bits_of_the_cpu(backend, axis, shape):
    residual, weight, grad = drawn((7, 20), 1), drawn((20, 5), 2), drawn((7, 5), 3)
    given = {"center": drawn(shape, 4), "axis": axis, "block": 8 if axis == "block" else 0}
    d, own = drawn((1, 5), 5), {"product": backend.matmul}
    assert same(centred_matmul(residual, weight, **given), centred_matmul(residual, weight, **given, **own))
    for more in ({}, {"grad_center": d}):
        terms = centred_weight_gradient(residual, grad, **given, **more)
        assert same(terms, centred_weight_gradient(residual, grad, **given, **more, **own))
        assert same(centred_input_gradient(grad, weight, **more), centred_input_gradient(grad, weight, **more, **own))


def same(a, b):
    return a.tobytes() == b.tobytes()


@EMULATED
def test_tensors_of_the_backend_stay_with_it(backend):
    x = drawn((6, 64), 1)
    own = backend.put(x)
    recipe, policy = SCALE_RECIPES["nvfp4_te"], qsim.formats.POLICIES["ocp"]
    made = backend.quantize_blocks(own, recipe, policy, packed=True)
    expected = NUMBA.quantize_blocks(x, recipe, policy, packed=True)
    assert isinstance(made.codes, backend.xp.ndarray)
    assert isinstance(made.scales, backend.xp.ndarray)
    assert same(expected.codes, backend.get(made.codes))
    product = backend.matmul(own, own.swapaxes(-1, -2))
    assert isinstance(product, backend.xp.ndarray)
    assert same(NUMBA.matmul(x, x.T), backend.get(product))


@EACH
@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "mxfp8_floor", "nvfp4_te", "float8_e5m2_col"])
def test_a_nan_that_a_centre_makes_is_positive_on_every_backend(backend, recipe):
    inf, nan = np.inf, np.nan
    x, center = np.float32([[inf, 1, -nan, nan, 2, -inf]]), np.float32([[inf, nan, 1, -nan, -inf, -inf]])
    policy = qsim.formats.POLICIES["ocp"]
    made = backend.quantize_blocks(x, SCALE_RECIPES[recipe], policy, center=center)
    expected = qsim.encode(np.float32([[nan, nan, -nan, nan, inf, nan]]), SCALE_RECIPES[recipe].fmt, policy=policy)
    assert expected[:, [0, 1, 2, 3, 5]].tobytes() == made.codes[:, [0, 1, 2, 3, 5]].tobytes()
    assert (5, 1) == (made.counts.nan, made.counts.inf)


@EMULATED
def test_a_changed_model_is_no_model_of_a_device(backend):
    a, b = qsim.quantize(drawn((5, 64), 1), "e4m3"), qsim.quantize(drawn((64, 6), 2), "e4m3", axis=0)
    for change in ({"fraction": 3}, {"result": 23, "fraction": 25}):
        changed = dataclasses.replace(qsim.gemm.MODELS["hopper_wgmma"], **change)
        with pytest.raises(UsageError, match="model hopper_wgmma, changed has no kernel"):
            qsim.scaled_gemm(a, b, accumulate=changed, backend=backend)
    both(backend, a, b, accumulate=dataclasses.replace(qsim.gemm.MODELS["hopper_wgmma"]))


@EMULATED
@pytest.mark.parametrize("model", ["hopper_wgmma", "hopper_mma_sync"])
def test_narrow_integers_cut_k_as_any_other(backend, model):
    a, b = qsim.quantize(drawn((5, 300), 1), "e4m3"), qsim.quantize(drawn((300, 6), 2), "e4m3", axis=0)
    for split_k, promote in ((np.int8(2), None), (np.uint8(3), np.int8(64)), (np.int8(1), np.uint8(128))):
        both(backend, a, b, accumulate=model, split_k=split_k, promote_every=promote)


@pytest.mark.usefixtures("gpp")
def test_threads_at_once_get_the_bits_of_one():
    backend, x = get_backend("emulated"), drawn((20, 70), 1)
    codes = NUMBA.quantize(x, np.float32(3), None, CastSpec(fmt=FORMATS["float8_e4m3fn"], policy=POLICIES["ocp"])).codes
    spec = CastSpec(fmt=FORMATS["float8_e4m3fn"], policy=POLICIES["ocp"])
    jobs = [lambda: backend.matmul(x, x.T), lambda: backend.decode(codes, np.float32(0.5), None, spec)]
    expected = [job().tobytes() for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: jobs[i % 2]().tobytes(), range(40)))
    assert expected * 20 == made


@EACH
def test_packed_codes_of_eight_bits_and_an_amax_that_is_none_are_refused(backend):
    x, policy = drawn((2, 32), 1), POLICIES["ocp"]
    with pytest.raises(FormatError, match="packed=True needs 4-bit codes"):
        backend.quantize_blocks(x, SCALE_RECIPES["mxfp8_floor"], policy, packed=True)
    for wrong in (np.nan, -1.0, np.inf):
        with pytest.raises(UsageError, match="is no finite magnitude"):
            backend.quantize_blocks(x, SCALE_RECIPES["nvfp4_exact"], policy, tensor_amax=np.float32(wrong))


@EMULATED
def test_a_wrong_kind_is_a_usage_error_and_an_address_is_none(backend):
    with pytest.raises(UsageError, match="lead 2 of x"):
        backend.observe(drawn((2, 3), 1), None, lead=2, mean_axes=None)
    with pytest.raises(UsageError, match="matmul of float64"):
        backend.matmul(np.zeros((2, 2)), np.zeros((2, 2), np.float32))
    with pytest.raises(UsageError, match="length"):
        backend.unpack(np.zeros((2, 2), np.uint8), "3")
    room = np.zeros(6 * 64 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(6, 64)  # no float32 begins there
    room[...] = drawn((6, 64), 1)
    plain = room.copy()
    assert same(NUMBA.matmul(plain, plain.T), backend.matmul(room, room.T))
    recipe = SCALE_RECIPES["mxfp4_even"]
    made = backend.quantize_blocks(room, recipe, POLICIES["ocp"])
    assert same(NUMBA.quantize_blocks(plain, recipe, POLICIES["ocp"]).codes, made.codes)


def test_a_product_with_no_columns_and_a_block_centre_is_empty():
    a = qsim.quantize(np.ones((2, 32), np.float32), "mxfp8_floor")
    b = qsim.quantize(np.ones((32, 0), np.float32), "mxfp8_floor", axis=0, center="block")
    assert (2, 0) == qsim.scaled_gemm(a, b).shape


def test_no_room_within_a_launcher_is_a_device_memory_error(monkeypatch):
    monkeypatch.setattr("qsim.backends.cuda.nvrtc_version", lambda: "played")
    backend = CudaBackend(played_device(monkeypatch, room=2000))
    x = backend.put(drawn((20, 20), 1))
    assert backend.observe(x, None, lead=1, mean_axes=None).amax.shape == (20,)
    backend.xp.room = 1000  # a launcher's own copy finds none
    with pytest.raises(DeviceMemoryError, match=r"out of device memory: .* use fewer replicas"):
        backend.observe(x.swapaxes(0, 1), None, lead=1, mean_axes=None)


@pytest.mark.parametrize("body", ["exit 1", "true"])
def test_a_compiler_that_does_not_work_is_one_line(tmp_path, monkeypatch, body):
    (tmp_path / "g++").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BackendError, match=r"backend emulated: .*g\+\+"):
        EmulatedBackend()
    done = subprocess.run(
        [sys.executable, "-m", "qsim", "run", "D01", "--backend", "emulated", "--steps", "3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qsim: backend emulated: ")
    assert "Traceback" not in done.stderr
