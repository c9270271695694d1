"""FP8 sums by wgmma, emulated from tensor maps to accumulators: the bits of hopper_wgmma and of an H200."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuda_kernels import DeviceUnavailableError, _place, _tensor_map
from cuda_kernels import fp8_wgmma as launcher
from cuda_kernels._place import HOST, Host, _device_arguments
from cuda_kernels.fp8_wgmma import FP8_WGMMA, MODEL, SHARED, fp8_wgmma
from qsim.codec import encode
from qsim.formats import FORMATS
from qsim.gemm import MODELS, block_dot
from qsim.gemm.products import accumulate
from qsim.gemm.scaled import ScaledOperand
from tests.golden_rows import need_rows
from tests.places import launch, played_device
from tests.played_cupy import Function
from tests.unit.test_block_dot import WORKED, row

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SHAPES = [(1, 1, 1), (3, 5, 33), (130, 2, 160), (7, 131, 128), (64, 9, 256), (2, 3, 700)]
CUTS = [{}, {"promote_every": 128}, {"promote_every": 32}, {"promote_every": 96}, {"split_k": 2},
        {"promote_every": 64, "split_k": 3}]  # fmt: skip
BLOCKS = [((1, 128), (128, 128), None), ((1, 128), (1, 128), 64), ((1, 64), (2, 128), None), (None, (128, 128), 32),
          ((3, 128), None, None), ((128, 256), (5, 128), None)]  # fmt: skip


def drawn(shape, *, hostile=False):
    """Codes close in size, so that sums cancel, with zeros and subnormals; hostile: NaN and Inf among them."""
    rows, columns, depth = shape
    rng = np.random.default_rng(rows + 7 * columns + 31 * depth)
    codes = []
    for n in (rows, columns):
        own = rng.integers(0x28, 0x50, (n, depth)).astype(np.uint8) | (rng.integers(0, 2, (n, depth)) << 7).astype(
            np.uint8
        )
        odd = rng.random(own.shape)
        own[odd < 0.2] = rng.integers(0, 8, own.shape)[odd < 0.2]
        if hostile:  # few, so that most outputs stay finite
            own[odd > 1 - 0.3 / depth] = rng.integers(0x78, 0x80, own.shape)[odd > 1 - 0.3 / depth]
        codes.append(own)
    return codes


def operand(codes, name, scale=None, extent=None):
    block = None if scale is None else scale.astype(np.float64)
    return ScaledOperand(codes=codes, fmt=FORMATS[name], row=np.ones(len(codes)), block=block, extent=extent or (1, 1))


def blocks_of(shape, extents, seed):
    """Scales as the kernels take them; among them 0, a subnormal, and of either sign."""
    rng = np.random.default_rng(seed)
    out = []
    for size, extent in zip(shape[:2], extents, strict=True):
        if extent is None:
            out += [None, None]
            continue
        scale = np.exp(3 * rng.standard_normal((-(-size // extent[0]), -(-shape[2] // extent[1])))).astype(np.float32)
        scale.flat[::7] *= -1
        scale.flat[3::11] = (0, 1e-40)[seed % 2]
        out += [scale, extent]
    return tuple(out)


def expected(a, b, formats, scales=(None, None, None, None), model=MODEL, **cut):
    left, right = operand(a, formats[0], *scales[:2]), operand(b, formats[1], *scales[2:])
    with np.errstate(all="ignore"):
        return accumulate(left, right, model, **cut).acc


def same(left, right):
    assert left.dtype == right.dtype == np.float32
    assert left.tobytes() == right.tobytes(), np.argwhere(left.view(np.uint32) != right.view(np.uint32))[:3]


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("formats", FP8_WGMMA)
def test_emulated_bits_are_those_of_the_model(formats):
    finite = total = 0
    for shape in SHAPES:
        for hostile in (False, True):
            a, b = drawn(shape, hostile=hostile)
            for cut in CUTS if formats == (E4M3, E5M2) else CUTS[:2]:
                want = expected(a, b, formats, **cut)
                same(want, launch(fp8_wgmma, a, b, formats=formats, **cut))
                finite, total = finite + np.isfinite(want).sum(), total + want.size
    assert 0.5 * total < finite < total


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("extents", BLOCKS)
def test_block_scales_join_each_partial_in_one_rounding(extents):
    *extents, promote = extents
    for at, shape in enumerate([(130, 7, 300), (3, 140, 256), (6, 5, 40)]):
        a, b = drawn(shape, hostile=at == 2)
        scales = blocks_of(shape, extents, at)
        for split in (1, 2):
            cut = {"promote_every": promote, "split_k": split}
            want = expected(a, b, (E4M3, E4M3), scales, **cut)
            same(want, launch(fp8_wgmma, a, b, formats=(E4M3, E4M3), scales=scales, **cut))


@pytest.mark.usefixtures("gpp")
def test_scales_that_are_not_finite_and_results_that_leave_float32():
    a, b = drawn((4, 3, 256))
    scale = np.array([[np.nan, 1], [np.inf, -np.inf], [3e38, 3e38], [1e-38, -1e-38]], np.float32)
    scales = scale, (1, 128), np.full((3, 2), 2.0, np.float32), (1, 128)
    want = expected(a, b, (E4M3, E4M3), scales)
    assert {0x7FFFFFFF, 0x7F800000} <= set((want.view(np.uint32) & 0x7FFFFFFF).flat)
    same(want, launch(fp8_wgmma, a, b, formats=(E4M3, E4M3), scales=scales))


@pytest.mark.usefixtures("gpp")
def test_worked_vectors():
    cases = [case for case in WORKED.values() if case[2] == 0]
    a, b = (np.concatenate([encode(row(case[side]), "e4m3")[None] for case in cases]) for side in (0, 1))
    got = np.diagonal(launch(fp8_wgmma, a, b, formats=(E4M3, E4M3)))
    assert [hex(case[3]) for case in cases] == [hex(bits) for bits in got.copy().view(np.uint32).tolist()]
    inf, one, zero, nan = 0x7C, 0x3C, 0x00, 0x7F
    pairs = np.array([(inf, one), (0xFC, one), (inf, zero), (nan, one)], np.uint8)
    got = np.diagonal(launch(fp8_wgmma, pairs[:, :1], pairs[:, 1:], formats=(E5M2, E5M2))).copy().view(np.uint32)
    assert [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7FFFFFFF] == got.tolist()


@pytest.mark.usefixtures("gpp")
def test_a_chain_stalls_where_promotion_does_not():
    ones = np.full((1, 16448), 0x38, np.uint8)
    assert launch(fp8_wgmma, ones, ones, formats=(E4M3, E4M3))[0, 0] == 16384
    assert launch(fp8_wgmma, ones, ones, formats=(E4M3, E4M3), promote_every=128)[0, 0] == 16448
    a, b = (np.full((1, 8192), encode(np.float32(v), "e5m2"), np.uint8) for v in (1 / 32, 3))
    assert round(float(launch(fp8_wgmma, a, b, formats=(E5M2, E5M2))[0, 0])) == 683


@pytest.mark.usefixtures("gpp")
def test_every_hardware_row_of_an_h200():
    rows = need_rows("h200_e4m3")
    out = np.empty(5000, np.float32)
    for start in range(0, 5000, 128):
        here = slice(start, start + 128)
        sums = launch(fp8_wgmma, rows["a_codes"][here], rows["b_codes"][here], formats=(E4M3, E4M3))
        out[here] = np.diagonal(sums)
    assert 5000 == np.count_nonzero(out.view(np.uint32) == rows["d_f32_bits"])


@pytest.mark.usefixtures("gpp")
def test_strides_addresses_and_the_grid_do_not_matter():
    a, b = drawn((150, 140, 144))
    want = expected(a, b, (E4M3, E5M2))
    wide = np.full((150, 288), 0x7F, np.uint8)  # NaN between the codes
    wide[:, ::2] = a
    room = np.full(b.size + 17, 0x7F, np.uint8)
    odd = room[1 : 1 + b.size].reshape(b.shape)
    odd[...] = b
    for left, right in ((wide[:, ::2], odd), (np.asfortranarray(a), b[::-1][::-1])):
        same(want, launch(fp8_wgmma, left, right, formats=(E4M3, E5M2)))
    for grid in (1, 2, 4):
        same(want, fp8_wgmma(Host(blocks=(grid, 1)), a, b, formats=(E4M3, E5M2)))
    same(expected(a[:, :37], b[:, :37], (E4M3, E5M2)), launch(fp8_wgmma, a[:, :37], b[:, :37], formats=(E4M3, E5M2)))


@pytest.mark.usefixtures("gpp")
def test_a_device_gets_the_maps_by_value(monkeypatch):
    place = played_device(monkeypatch)
    a, b = (place.upload(x) for x in drawn((5, 6, 200)))
    taken = []
    monkeypatch.setattr(place.cupy, "function", lambda entry, _: Function(lambda *launch: taken.append(launch)))
    arguments = []
    monkeypatch.setattr(_place, "_device_arguments", lambda args: arguments.append(plain(args)) or ())
    plain = _device_arguments
    fp8_wgmma(place, a, b, formats=(E4M3, E4M3), promote_every=128, split_k=2)
    assert [((1,), (384,), SHARED)] * 2 == [(grid, block, dynamic) for grid, block, _, dynamic, _ in taken]
    assert [SHARED] == list(place.cupy.shared.values())
    assert [(128, 1)] * 4 == [(arg.nbytes, arg.size) for args in arguments for arg in args[:2]]
    map_ = place.tensor_map(place.upload(np.zeros((4, 32), np.uint8)), (128, 128))
    assert map_.words.ctypes.data % 64 == 0
    assert plain([map_, None])[0].__array_interface__["data"][0] == map_.words.ctypes.data


def test_the_driver_is_asked_for_the_map_that_the_emulation_decodes(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    asked = []

    def encode_tiled(*args):
        asked.append(args)
        made = SimpleNamespace(opaque=[driver.cuuint64_t(7 * i) for i in range(16)])
        return driver.CUresult(0), made

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    room = np.zeros((6, 48), np.uint8)
    fake = SimpleNamespace(
        data=SimpleNamespace(ptr=1 << 20), dtype=room.dtype, shape=(6, 40), strides=room.strides
    )  # fmt: skip
    made = _tensor_map.device_map(fake, (128, 128))
    assert [7 * i for i in range(16)] == made.words.tolist()
    kind, rank, address, dims, strides, box, steps, interleave, swizzle, _, fill = asked[0]
    assert (int(kind), rank, address, int(interleave), int(swizzle), int(fill)) == (0, 2, 1 << 20, 0, 3, 0)
    assert [[40, 6], [48], [128, 128], [1, 1]] == [[int(x) for x in own] for own in (dims, strides, box, steps)]
    words = _tensor_map.emulated_map(room[:, :40], (128, 128)).words.tolist()
    assert [40, 6, 48, 128 | 128 << 32, 3] == words[1:6]
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *_: (driver.CUresult(1), None))
    with pytest.raises(DeviceUnavailableError, match="CUDA_ERROR_INVALID_VALUE"):
        _tensor_map.device_map(fake, (128, 128))


def test_what_tma_cannot_load_is_named():
    room = _aligned(np.zeros((8, 64), np.uint8))
    for array, box, message in (
        (room[:, 1:33], (128, 128), "a multiple of 16; the array"),
        (room.reshape(-1)[: 7 * 40].reshape(7, 40), (128, 128), "16 bytes apart"),
        (room.T, (128, 128), "columns lie together"),
        (room.view(np.uint16), (128, 128), "matrix of uint8"),
        (room, (512, 128), "a box of 1 to 256"),
        (room[:0], (128, 128), "extents of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            HOST.tensor_map(array, box)


def _aligned(array):
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    return room[start : start + array.nbytes].reshape(array.shape)


def test_nothing_to_add_is_zero():
    empty = np.zeros((2, 0), np.uint8), np.zeros((3, 0), np.uint8)
    assert not launch(fp8_wgmma, *empty, formats=(E4M3, E4M3)).any()
    assert launch(fp8_wgmma, empty[0][:0], empty[1], formats=(E4M3, E4M3)).shape == (0, 3)


def test_the_model_exists_and_only_hopper_has_it():
    assert MODEL in MODELS
    assert MODELS[MODEL].step == launcher.STEP
    kernel = FP8_WGMMA[E4M3, E4M3]
    assert [kernel.runs_on(arch) for arch in ("sm_89", "sm_90a", "sm_100a")] == [False, True, False]
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=0, compute_capability="100")))
    with pytest.raises(DeviceUnavailableError, match="runs on sm_90a; this device is sm_100a"):
        kernel.on_device(fake)


def test_wrong_arguments_are_named():
    a, s = np.zeros((2, 256), np.uint8), np.ones((2, 2), np.float32)
    good = (s, (1, 128), s, (1, 128))
    for change, error, message in (
        ({"formats": ("float4_e2m1fn", E4M3)}, ValueError, "wgmma takes pairs of float8_e4m3fn"),
        ({"promote_every": 48}, ValueError, "choose a multiple of 32"),
        ({"promote_every": 0}, ValueError, "choose a multiple of 32"),
        ({"split_k": 0}, ValueError, "one part or more"),
        ({"scales": good, "promote_every": 96}, ValueError, "must divide 128"),
        ({"scales": (s, (1, 128), np.ones((2, 3), np.float32), (1, 96))}, ValueError, "96 and of 128 along K"),
        ({"scales": (np.ones((2, 16), np.float32), (1, 16), None, None)}, ValueError, "blocks of 16 along K"),
        ({"scales": (s, (1, 128), s, None)}, ValueError, "scales of b: pass an array and"),
        ({"scales": (s[:1], (1, 128), s, (1, 128))}, ValueError, r"scales of a of shape \(1, 2\).*are \(2, 2\)"),
        ({"scales": (s.astype(np.float64), (1, 128), s, (1, 128))}, TypeError, "the scales of a is numpy"),
    ):
        with pytest.raises(error, match=message):
            fp8_wgmma(HOST, a, a, **{"formats": (E4M3, E4M3), **change})
    with pytest.raises(ValueError, match=r"not \[M, K\] and \[N, K\]"):
        fp8_wgmma(HOST, a, a[:, :2], formats=(E4M3, E4M3))
    with pytest.raises(TypeError, match=r"b is numpy\.ndarray of int8"):
        fp8_wgmma(HOST, a, a.astype(np.int8), formats=(E4M3, E4M3))


@pytest.mark.usefixtures("gpp")
def test_a_chain_equals_the_dot_product_of_its_row():
    a, b = drawn((4, 3, 96), hostile=True)
    left, right = np.repeat(a, 3, axis=0), np.tile(b, (4, 1))
    want = block_dot(left, right, fmt_a=E5M2, fmt_b=E4M3, model=MODEL).reshape(4, 3)
    same(want, launch(fp8_wgmma, a, b, formats=(E5M2, E4M3)))
