"""FP8 sums by mma.sync, emulated by fragments: the bits of the models and of recorded hardware rows."""

import sys
import types

import numpy as np
import pytest

from cuda_kernels import DeviceUnavailableError
from cuda_kernels._place import HOST, Host, device
from cuda_kernels.fp8_mma import FP8_MMA, MODELS, fp8_mma
from qsim.gemm import MODELS as KNOWN
from qsim.gemm import block_dot
from tests.golden_rows import need_rows
from tests.mutants import mutant
from tests.places import launch, place

SHAPES = [(1, 1, 1), (3, 5, 7), (20, 70, 96), (65, 9, 33), (2, 2, 32), (1, 3, 200), (5, 4, 64)]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def drawn(shape, *, hostile):
    """Codes and accumulators; hostile: NaN and Inf among them, subnormals and zeros in both."""
    rows, columns, depth = shape
    rng = np.random.default_rng(rows + 7 * columns + 31 * depth)
    codes = [rng.integers(0, 256, (n, depth)).astype(np.uint8) for n in (rows, columns)]
    if not hostile:  # 0x7B is the largest finite code of E5M2, and finite in E4M3
        codes = [each & 0x80 | np.minimum(each & 0x7F, 0x7B).astype(np.uint8) for each in codes]
    c = (rng.standard_normal((rows, columns)) * np.exp(8 * rng.standard_normal((rows, columns)))).astype(np.float32)
    c.flat[::5] = (0, -0.0)[rows % 2]
    if hostile:
        c.flat[-1] = np.inf
    return *codes, c


def expected(a, b, c, formats, model):
    left, right = np.repeat(a, len(b), axis=0), np.tile(b, (len(a), 1))
    out = block_dot(left, right, c.reshape(-1), fmt_a=formats[0], fmt_b=formats[1], model=model)
    return out.reshape(c.shape)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("formats", FP8_MMA)
def test_emulated_bits_are_those_of_the_model(formats, arch, hostile):
    model = MODELS[arch]
    for shape in SHAPES:
        a, b, c = drawn(shape, hostile=hostile)
        before = c.copy()
        got = fp8_mma(Host(arch), a, b, formats=formats, c=c)
        assert expected(a, b, c, formats, model).tobytes() == got.tobytes(), shape
        assert before.tobytes() == c.tobytes()


@pytest.mark.usefixtures("gpp")
def test_cancelling_sums_tell_the_models_apart():
    # 448 * 448 swallows 2^-9 * 1 in ada's 13 bits and in 25; 240 * 1 + 2^-9 tells them apart.
    a, b = np.zeros((1, 32), np.uint8), np.full((1, 32), 0x38, np.uint8)  # 0x38 = 1.0
    a[0, :2] = 0x77, 0x01  # 240, 2^-9
    own = [fp8_mma(Host(arch), a, b, formats=(E4M3, E4M3))[0, 0] for arch in ("sm_89", "sm_90a")]
    assert own == [np.float32(240), np.float32(240 + 2**-9)]


@pytest.mark.usefixtures("gpp")
def test_every_hardware_row_of_ada():
    if place().arch != "sm_89":
        pytest.skip(f"rows of sm_89; mma.sync of {place().arch} adds otherwise")
    rows = need_rows("ada_e5m2")
    c, out = rows["c_bits"].view(np.float32), np.empty(5000, np.float32)
    for start in range(0, 5000, 50):
        here = slice(start, start + 50)
        wide = np.broadcast_to(c[here], (50, 50))
        sums = launch(fp8_mma, rows["a_codes"][here], rows["b_codes"][here], formats=(E5M2, E5M2), c=np.array(wide))
        out[here] = np.diagonal(sums)
    assert 5000 == np.count_nonzero(out.view(np.uint32) == rows["d_f32_bits"])


@pytest.mark.usefixtures("gpp")
def test_strides_do_not_matter_and_no_accumulator_is_zero():
    a, b, c = drawn((9, 6, 64), hostile=False)
    plain = launch(fp8_mma, a, b, formats=(E4M3, E5M2), c=0 * c)
    wide = np.zeros((9, 128), np.uint8)
    wide[:, ::2] = a
    assert plain.tobytes() == launch(fp8_mma, wide[:, ::2], np.asfortranarray(b), formats=(E4M3, E5M2)).tobytes()


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tile.cuh", "at.g + 8 * (i % 2)) * QSIM_PITCH + k + at.t + 4 * (i / 2)",
         "at.g + 8 * (i / 2)) * QSIM_PITCH + k + at.t + 4 * (i % 2)"),  # a[1] and a[2] swapped
        ("tile.cuh", "QSIM_PITCH + k + at.t + 4 * i]", "QSIM_PITCH + k + at.t + 4 * (1 - i)]"),  # b[0] and b[1]
        ("mma_fp8.cuh", "left[g + 8 * (i % 2)][place_of(16 * (i / 2)", "left[g + 8 * (i / 2)][place_of(16 * (i % 2)"),
        ("mma_fp8.cuh", "right[g][place_of(16 * i + 4", "right[g][place_of(16 * (1 - i) + 4"),
        ("mma_fp8.cuh", "FRACTION = QSIM_LOWERED ? 25 : 13", "FRACTION = QSIM_LOWERED ? 25 : 14"),
        ("mma_fp8.cuh", "RESULT = QSIM_LOWERED ? 23 : 13", "RESULT = QSIM_LOWERED ? 23 : 14"),
    ],
)  # fmt: skip
def test_a_wrong_index_or_width_is_seen(monkeypatch, file, old, new):
    kernel, more = FP8_MMA[E4M3, E4M3], ("-DQSIM_EMULATED_ARCH=89",)
    changed = mutant(monkeypatch, kernel, file, old, new, drop=r"\nQSIM_FP8_ENTRIES\(.*E5M2.*", options=more)
    a, b, c = drawn((16, 16, 64), hostile=False)
    out = fp8_mma(changed, a, b, formats=(E4M3, E4M3), c=c)
    assert expected(a, b, c, (E4M3, E4M3), "ada_mma_sync").tobytes() != out.tobytes()


def test_the_targets_name_models_that_exist():
    assert set(MODELS.values()) <= set(KNOWN)
    assert all(set(MODELS) == set(kernel.arches) for kernel in FP8_MMA.values())


def test_nothing_to_add_is_the_accumulator():
    c = np.array([[1.5, -0.0]], np.float32)
    empty = np.zeros((1, 0), np.uint8), np.zeros((2, 0), np.uint8)
    assert c.tobytes() == launch(fp8_mma, *empty, formats=(E4M3, E4M3), c=c).tobytes()
    assert launch(fp8_mma, empty[0][:0], empty[1], formats=(E4M3, E4M3)).shape == (0, 2)


def test_too_old_a_device_is_named(monkeypatch):
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    fake = types.ModuleType("cupy")
    fake.cuda = types.SimpleNamespace(Device=lambda: device_of, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    device_of = types.SimpleNamespace(id=0, compute_capability="80")
    with pytest.raises(DeviceUnavailableError, match="runs on sm_89, sm_90a, sm_100a; this device is sm_80"):
        FP8_MMA[E4M3, E4M3].on_device(device().cupy)
    device_of = types.SimpleNamespace(id=0, compute_capability="75")
    with pytest.raises(DeviceUnavailableError, match=r"capability 7\.5; the kernels need 8\.0 or newer"):
        device()


def test_wrong_arguments_are_named():
    a = np.zeros((2, 3), np.uint8)
    for call, error, message in (
        (lambda: fp8_mma(HOST, a, a, formats=("float4_e2m1fn", E4M3)), ValueError, "takes pairs of float8_e4m3fn"),
        (
            lambda: fp8_mma(HOST, a, a.astype(np.int8), formats=(E4M3, E4M3)),
            TypeError,
            r"b is numpy\.ndarray of int8",
        ),
        (lambda: fp8_mma(HOST, a, a[:, :2], formats=(E4M3, E4M3)), ValueError, r"not \[M, K\] and \[N, K\]"),
        (lambda: fp8_mma(HOST, a, a, formats=(E4M3, E4M3), c=np.zeros(2, np.float32)), ValueError, r"\[M, N\]"),
        (
            lambda: fp8_mma(HOST, a, a, formats=(E4M3, E4M3), c=np.zeros((2, 2), np.float32), split_k=2),
            ValueError,
            "begins the one chain",
        ),
        (lambda: fp8_mma(HOST, a, a, formats=(E4M3, E4M3), promote_every=24), ValueError, "a multiple of 16"),
        (lambda: fp8_mma(Host("sm_90a"), a, a, formats=(E4M3, E4M3), promote_every=48), ValueError, "a multiple of 32"),
    ):
        with pytest.raises(error, match=message):
            call()
