"""Tensor-core models against mmaemu, whose presets were held against an H100 and an RTX 4060, on random chains."""

import warnings

import numpy as np
import pytest

import qsim
from qsim.gemm import MODELS
from qsim.gemm.products import accumulate
from qsim.gemm.scaled import ScaledOperand
from tests.oracles import need, need_torch

mmaemu = need("mmaemu")
torch = need_torch()

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
PROFILES = {"hopper": "hopper_wgmma", "ada": "ada_mma_sync"}


def operand(rows, depth, fmt, rng, finite):
    """Random codes, every pattern equally likely, or numbers of like size whose sums cancel."""
    if rng.random() < 0.5:
        codes = rng.integers(0, 256, (rows, depth)).astype(np.uint8)
    else:
        codes = qsim.encode(rng.standard_normal((rows, depth)).astype(np.float32), fmt)
    if finite:
        codes[~np.isfinite(qsim.decode(codes, fmt))] = 0x30
    return codes


def theirs(a, b, fmt_a, fmt_b, profile, fast):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes without hardware evidence
        return mmaemu.accumulate(
            torch.from_numpy(a).view(DTYPES[fmt_a]), torch.from_numpy(b).view(DTYPES[fmt_b]), use_fast_accum=fast,
            profile=profile, splitk=1, backend="reference",
        ).numpy()  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("fmt_a", "fmt_b"), [(a, b) for a in DTYPES for b in DTYPES])
def test_random_chains_agree_bit_for_bit(profile, fast, fmt_a, fmt_b):
    rng = np.random.default_rng([len(profile), fast, len(fmt_a), len(fmt_b)])
    for depth in (1, 31, 32, 100, 416, 1000):
        for finite in (True, False):
            a, b = operand(11, depth, fmt_a, rng, finite), operand(13, depth, fmt_b, rng, finite)
            sides = [
                ScaledOperand(codes=x, fmt=qsim.get_format(fmt), row=np.ones(len(x)))
                for x, fmt in ((a, fmt_a), (b, fmt_b))
            ]
            ours = accumulate(*sides, MODELS[PROFILES[profile]], promote_every=None if fast else 128).acc
            other = theirs(a, b, fmt_a, fmt_b, profile, fast)
            both_nan = np.isnan(ours) & np.isnan(other)
            assert ((ours.view(np.uint32) == other.view(np.uint32)) | both_nan).all(), (depth, finite)
