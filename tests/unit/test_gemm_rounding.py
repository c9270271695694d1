"""The last rounding of a product, where one rounding and two differ: ties met exactly, ties missed by a hair."""

from fractions import Fraction

import numpy as np
import pytest

from qsim.gemm import block_dot
from qsim.gemm.block_fma import dot_oracle
from qsim.gemm.epilogue import fma32
from qsim.gemm.exact import _round_oracle
from qsim.gemm.models import MODELS
from qsim.gemm.numba_kernels import exact_dots, exact_quads
from qsim.gemm.scaled_kernels import finish_bounded, finish_exact


def near_ties(count, seed):
    """S (53 bits) and f (24 bits): their product is a tie of float32 or lies within 2^-52 of one."""
    rng = np.random.default_rng(seed)
    S, f = [], []
    for _ in range(count):
        tie = (2 * int(rng.integers(1 << 23, 1 << 24)) + 1) << 60
        g = int(rng.integers(1 << 23, 1 << 24)) if rng.random() < 0.8 else 1 << 23
        s = tie // g
        s >>= max(s.bit_length() - 53, 0)
        S.append(float(s + int(rng.integers(0, 2))))
        f.append(float(np.float32(g)))
    return np.array(S), np.array(f)


def test_a_product_close_to_a_tie_is_rounded_once():
    S, f = near_ties(4000, 0)
    twice = 0
    for shift in (1.0, 2.0**-170):  # the second: subnormal results
        out = np.empty((1, S.size), np.float32)
        finish_exact(S[None], 1.0, np.array([shift]), f * 2.0**-100, out)
        for s, g, r in zip(S, f, out[0], strict=True):
            assert _round_oracle(Fraction(s) * Fraction(g) * Fraction(2) ** -100 * Fraction(shift)) == r
            twice += np.float32(s * (g * 2.0**-100 * shift)) != r
    assert twice > 100  # otherwise nothing was close enough


@pytest.mark.parametrize("divisor", [1.0, 21.0, 441.0])
def test_a_bound_never_proves_a_wrong_rounding(divisor):
    S, f = near_ties(3000, 1)
    out, left = np.empty((1, S.size), np.float32), np.empty((1, S.size), np.bool_)
    finish_bounded(S[None] * divisor, np.zeros(1), np.zeros(S.size), np.ones(1), f, divisor, out, left)
    right = [_round_oracle(Fraction(s * divisor) * Fraction(g) / int(divisor)) for s, g in zip(S, f, strict=True)]
    assert (left[0] | (out[0] == right)).all()
    assert left.any()
    ordinary = np.arange(1.0, 100.0)[None]
    finish_bounded(
        ordinary, np.zeros(1), np.zeros(99), np.ones(1), np.full(99, 0.7), divisor, out[:, :99], left[:, :99]
    )
    assert not left[:, :99].any()


def test_fma_close_to_a_tie():
    rng = np.random.default_rng(2)
    for _ in range(500):
        # a b = 2 mod 4 with 26 bits: a tie of float32; c decides
        a = np.float32(2 * int(rng.integers(1 << 11, 1 << 12)) + 1)
        b = np.float32(2 * (2 * int(rng.integers(1 << 11, 1 << 12)) + 1))
        for c in (np.float32(2.0**-60), np.float32(-(2.0**-60)), np.float32(0)):
            expected = _round_oracle(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
            assert expected == fma32(np.float32([a]), np.float32([b]), np.float32([c]))[0]


def test_exact_sums_are_rounded_to_odd():
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, 30)) * 2.0 ** rng.integers(-70, 70, (40, 30))
    columns = rng.standard_normal((40, 30)) * 2.0 ** rng.integers(-70, 70, (40, 30))
    bits = np.int64(~((1 << 24) - 1))  # 29 bits, as decoded elements have at most
    rows, columns = ((x.view(np.int64) & bits).view(np.float64) for x in (rows, columns))
    rows[:10, 1:] = 0  # single products, some of them exact
    rows[5:10, 0] = 1.5
    columns[10:20, 1], rows[10:20, 1] = -columns[10:20, 0], rows[10:20, 0]  # the largest may cancel
    at = np.arange(40)
    sums, exact = np.empty(40), np.empty(40, np.bool_)
    exact_dots(rows, columns, at, at, sums, exact)
    for i in range(40):
        true = sum((Fraction(x) * Fraction(y) for x, y in zip(rows[i], columns[i], strict=True)), Fraction(0))
        check_odd(true, sums[i], bool(exact[i]))
    assert exact[5:10].all()
    assert not exact.all()
    parts = rng.standard_normal((50, 4)) * 2.0 ** rng.integers(-60, 60, (50, 4))
    sums, exact = np.empty(50), np.empty(50, np.bool_)
    exact_quads(parts, sums, exact)
    for i in range(50):
        check_odd(sum(map(Fraction, parts[i])), sums[i], bool(exact[i]))


def check_odd(true, rounded, exact):
    if exact:
        assert true == Fraction(rounded)
        return
    assert 1 == int(np.float64(rounded).view(np.int64)) & 1
    low, high = (Fraction(float(np.nextafter(rounded, end))) for end in (-np.inf, np.inf))
    assert low < true < high


@pytest.mark.parametrize("name", ["hopper_wgmma", "hopper_mma_sync", "ada_mma_sync", "blackwell_tcgen05"])
@pytest.mark.parametrize("half", [False, True])
def test_a_subnormal_accumulator_keeps_the_exponent_of_the_lowest_binade(name, half):
    zeros = np.zeros((1, 40), np.uint8)
    for c in (1e-40, -3e-45, 1.5e-38, 6e-8, -3.3e-7, 9e-5):
        out = block_dot(
            zeros, zeros, c, fmt_a="e4m3", fmt_b="e4m3", model=name, out_dtype="float16" if half else "float32"
        )
        own = dot_oracle(zeros[0], zeros[0], c, fmt_a="e4m3", fmt_b="e4m3", model=MODELS[name], half=half)
        assert hex(own.view(np.uint32)) == hex(out[0].view(np.uint32)), c
