"""The layout of block scales against torchao's own arrangement."""

import numpy as np
import pytest

from qsim.codec import swizzle_scales, unswizzle_scales
from tests.oracles import need, need_torch

torch = need_torch()
mx = need("torchao.prototype.mx_formats.utils", "0.18")

SHAPES = [(1, 1), (32, 4), (127, 3), (128, 4), (130, 5), (257, 9), (384, 32), (1, 130)]


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzled_scales_equal_those_of_torchao(shape):
    scales = np.random.default_rng(shape[0]).integers(0, 256, shape, dtype=np.uint8)
    blocked = mx.to_blocked(torch.from_numpy(scales)).numpy()
    assert blocked.tolist() == swizzle_scales(scales).tolist()
    assert scales.tolist() == unswizzle_scales(blocked, *shape).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_torchao_reads_swizzled_scales_back(shape):
    scales = np.random.default_rng(shape[1]).integers(0, 256, shape, dtype=np.uint8)
    back = mx.from_blocked(torch.from_numpy(swizzle_scales(scales)), *shape).numpy()
    assert scales.tolist() == back.tolist()
