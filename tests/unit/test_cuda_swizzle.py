"""The CUDA swizzle: compiled for every target, and emulated equal to the codec's on any shape."""

import numpy as np
import pytest

from cuda_kernels import DeviceUnavailableError
from cuda_kernels._nvrtc import cached_cubin
from cuda_kernels._place import HOST, device
from cuda_kernels.swizzle import SWIZZLE, swizzle, swizzled_size, unswizzle
from qsim.codec.swizzle import swizzle_scales, unswizzle_scales
from tests.places import launch

SHAPES = [(1, 1), (128, 4), (129, 5), (3, 70), (300, 17), (0, 4), (5, 0), (256, 8)]


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_it_equals_the_codec_both_ways(shape):
    scales = np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)
    tiles = launch(swizzle, scales)
    assert swizzle_scales(scales).tobytes() == tiles.tobytes()
    assert scales.tobytes() == launch(unswizzle, tiles, *shape).tobytes()
    for view in (scales[::-1, ::2], np.asfortranarray(scales)):
        assert swizzle_scales(view).tobytes() == launch(swizzle, view).tobytes()


@pytest.mark.usefixtures("gpp")
def test_padding_is_written_neutral_and_never_read():
    scales = np.full((130, 5), 0x7F, np.uint8)
    tiles = launch(swizzle, scales)
    assert 130 * 5 == np.count_nonzero(tiles)
    own = swizzle_scales(np.ones((130, 5), np.uint8)) == 1
    noise = np.where(own, tiles, np.uint8(0xFF))
    assert scales.tobytes() == launch(unswizzle, noise, 130, 5).tobytes() == unswizzle_scales(noise, 130, 5).tobytes()


@pytest.mark.usefixtures("nvrtc")
def test_a_cubin_is_kept_by_content_and_a_torn_one_is_compiled_anew(tmp_path):
    first = cached_cubin(SWIZZLE.text, "sm_90a", name=SWIZZLE.file, folder=tmp_path / "deep")
    (kept,) = (tmp_path / "deep").iterdir()
    assert first == cached_cubin(SWIZZLE.text, "sm_90a", name=SWIZZLE.file, folder=tmp_path / "deep")
    seen = kept.stat().st_mtime_ns
    assert kept.stat().st_mtime_ns == seen
    kept.write_bytes(kept.read_bytes()[:-40])
    assert first == cached_cubin(SWIZZLE.text, "sm_90a", name=SWIZZLE.file, folder=tmp_path / "deep")
    assert len(first) + 32 == kept.stat().st_size
    cached_cubin(SWIZZLE.text + "// other\n", "sm_90a", name=SWIZZLE.file, folder=tmp_path / "deep")
    cached_cubin(SWIZZLE.text, "sm_80", name=SWIZZLE.file, folder=tmp_path / "deep")
    assert 3 == len(list((tmp_path / "deep").iterdir()))
    (tmp_path / "file").write_text("no folder")
    assert first == cached_cubin(SWIZZLE.text, "sm_90a", name=SWIZZLE.file, folder=tmp_path / "file" / "x")


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="uint8"):
        swizzle(HOST, np.zeros((2, 2), np.int8))
    with pytest.raises(ValueError, match="2 axes"):
        swizzle(HOST, np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="take 512"):
        unswizzle(HOST, np.zeros(100, np.uint8), 2, 2)
    assert 512 == swizzled_size(1, 1)


def test_without_a_device_the_reason_is_given():
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:
        with pytest.raises(DeviceUnavailableError, match=r"CuPy is missing|no usable CUDA device"):
            device()
    else:
        pytest.skip("this machine has a device")
