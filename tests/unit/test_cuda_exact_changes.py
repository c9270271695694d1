"""Changes of the text of exact.cu that its tests must see: proofs that prove too much, accumulators that lose."""

import numpy as np
import pytest

from cuda_kernels._place import HOST
from cuda_kernels.exact import EXACT, SETTLE, exact_product, matmul
from qsim.gemm import matmul as on_cpu
from tests.places import changed, launch, launch_at
from tests.unit.test_cuda_exact import NO_PROOF, TINY, any_finite, cases, known
from tests.unit.test_cuda_exact_scaled import normal, of, rational, sides, taken

pytestmark = pytest.mark.usefixtures("gpp")


@pytest.fixture(scope="module")
def settling():
    """Where no output has a proof: all are summed again."""
    return changed((EXACT, SETTLE), *NO_PROOF)


def zero_or_less():
    """-2^-298 beside products that cancel: the float64 sum is 0, its ends round to zeros of both signs."""
    x = 2.0**-80
    return np.float32([[x, TINY, -x]]), np.float32([[x], [-TINY], [x]])


@pytest.mark.parametrize(("case", "old", "new"), [
    ("ties", "on_grid ? 0.0 :", "true ? 0.0 :"),  # every float64 sum taken for exact
    ("cancelling", "__dmul_rn((double)(stop - begin + 3), 0x1.00001p-53)", "0x1p-70"),  # a bound far too small
    ("zero", "return same && (fabs(t) > d || d == 0.0);", "return same;"),
    ("known", "reach, 0x1.00001p0) < qsim_power(53 +", "reach, 0x1.00001p0) < qsim_power(76 +"),
])  # fmt: skip
def test_a_proof_that_proves_too_much_is_seen(case, old, new):
    place = changed((EXACT,), (old, new))
    pairs = [zero_or_less()] if case == "zero" else [(a, b) for name, a, b in cases() if name == case]
    assert any(on_cpu(a, b).tobytes() != launch_at(place, matmul, a, b).tobytes() for a, b in pairs)
    assert all(on_cpu(a, b).tobytes() == launch(matmul, a, b).tobytes() for a, b in pairs)


@pytest.mark.parametrize(("old", "new"), [
    ("(below & 0x80000000u) && (more || (kept & 1u))", "below & 0x80000000u"),  # ties go up
    ("(below & 0x80000000u) && (more || (kept & 1u))", "(below & 0x80000000u) && more"),  # ties go down
    ("more = more || digits[i] != 0", "more = more"),  # what lies below the digit of the half
    ("bool more = (below & 0x7FFFFFFFu) != 0;", "bool more = false;"),  # and within it
    ("const int tiny = QSIM_UNIT - exponent - 149;", "const int tiny = QSIM_UNIT - exponent - 150;"),
    ("if (special != 0.0) return", "if (special > 0.0) return"),
    ("(negative ? 0x80000000u : 0u)", "0u"),
    ("digits[at + 2] += sign * (high >> 32);", ""),
    ("for (int by = 16; by > 0; by /= 2) sum +=", "for (int by = 8; by > 0; by /= 2) sum +="),  # lanes left out
    ("last = max(last, at + 2);", "last = max(last, at + 1);"),
])  # fmt: skip
def test_a_wrong_accumulator_is_seen(settling, old, new):
    place = type(settling)(made={**settling.made, **changed((SETTLE,), (old, new)).made})
    pairs = (known(), (any_finite((6, 40), 1), any_finite((40, 7), 2)))
    assert any(on_cpu(a, b).tobytes() != launch_at(place, matmul, a, b).tobytes() for a, b in pairs)
    assert all(on_cpu(a, b).tobytes() == matmul(settling, a, b).tobytes() for a, b in pairs)


def traps():
    """Operands whose results each part of the text decides, and the divisor."""
    yield of([[2.0**24, 3.0]], [21]), of([[1.0, 1.0]]), 21
    yield of([[2.0**24, 3.0]], [1 + 2.0**-50]), of([[1.0, 1.0]], [1 - 2.0**-50]), 1  # below the tie by 2^-76
    yield of([[2.0**24, 1.0, 2.0**-60]], [3]), of([[1.0, 1.0, 1.0]]), 3
    yield of([[1.0, 2.0**-80, -1.0]], [1.5]), of([[1.0, 2.0**-80, 1.0]], [-(2.0**-100)]), 1
    yield what_a_product_lost()
    for names in (("nvfp4_exact", "nvfp4_exact_16x16"), ("e4m3_1x128", "e4m3_128x128")):
        yield taken(*sides(names, normal((20, 150), 1), normal((150, 20), 2)))


def what_a_product_lost():
    """v^2 of 93 bits, less what float64 makes of it: only the rest is left."""
    one = np.float32(1 + 2.0**-23)
    product = (float(one) ** 2) ** 2
    pieces = [np.float32(product)]
    pieces += [np.float32(product - float(pieces[0]))]
    pieces += [np.float32(product - float(pieces[0]) - float(pieces[1]))]
    assert sum(map(float, pieces)) == product
    a, b = of([[one, -1.0, -1.0, -1.0]]), of([[one, *pieces]])
    scales = {"block": np.float32([[one, 1, 1, 1]]), "extent": (1, 1)}
    return a._replace(**scales), b._replace(**scales), 1


@pytest.mark.parametrize(("kernel", "old", "new"), [
    (EXACT, "(unsigned)k / (unsigned)x.width", "(unsigned)k / (unsigned)(x.width + 1)"),
    (EXACT, "x.block + row / x.band * x.columns", "x.block + row / x.band"),
    (EXACT, "t = __ddiv_rn(product, by.divisor);", ""),
    (EXACT, "if (!exact) d =", "if (false) d ="),  # the roundings of the factors do not count
    (EXACT, "__dmul_rn(first, by.column);", "first;"),
    (SETTLE, "if (by.divisor != 1.0) qsim_divide", "if (false) qsim_divide"),
    (SETTLE, "rest != 0.0 ? qsim_add(digits, rest) : at", "at"),
    (SETTLE, "exponent += qsim_multiply(digits, by.column);", "exponent += 0;"),
    (SETTLE, "before = own;", ""),
    (SETTLE, "negative = negative !=", "negative = false !="),
])  # fmt: skip
def test_a_wrong_block_factor_or_divisor_is_seen(settling, kernel, old, new):
    made = changed((kernel,), (old, new)).made
    place = type(settling)(made={**settling.made, **made} if kernel is SETTLE else made)
    right = HOST if kernel is EXACT else settling
    expected = [rational(a, b, divisor).tobytes() for a, b, divisor in traps()]
    for where in (right, place):
        got = [exact_product(where, a, b, divisor=divisor).tobytes() for a, b, divisor in traps()]
        assert (expected == got) == (where is right)
