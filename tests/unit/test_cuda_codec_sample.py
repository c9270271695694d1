"""The device functions behind the CUDA encode, cast and decode, in a plain loop over a stratified sample of float32.

The functions are those of the kernels' own texts, built with g++ as the emulation builds them; a kernel of one thread
runs the loop, so no fibre is switched and 2^26 patterns take seconds.
"""

import ctypes
from functools import cache

import numpy as np
import pytest

from cuda_kernels import host
from cuda_kernels._place import HOST
from cuda_kernels.cast import CAST
from cuda_kernels.decode import decode as decode_codes
from cuda_kernels.encode import ENCODE
from qsim.codec import decode, encode
from qsim.codec.general import rule_words
from qsim.codec.tables import decode_table
from qsim.formats import FORMATS, POLICIES
from tests.unit.test_cuda_encode import assert_codes_equal, params

pytestmark = pytest.mark.usefixtures("gpp")

CASES = [
    ("float8_e4m3fn", "ocp"),  # saturating, and NaN keeps its sign
    ("float8_e4m3fn", "cuda_nosat"),
    ("float8_e5m2", "ocp"),  # saturating
    ("float8_e5m2", "ml_dtypes"),
    ("float4_e2m1fn", "ml_dtypes"),  # it always saturates; a NaN becomes a zero of the other sign
]
LOOPS = {
    "encode": (
        ENCODE,
        """
extern "C" __global__ void qsim_sample(const float* x, unsigned char* codes, long long count, const int* of)
{
    const QsimFormat k = {of[0], of[1], (unsigned)of[2], (unsigned)of[3], (unsigned)of[4], (unsigned)of[5],
                          (unsigned)of[6], (unsigned)of[7]};
    for (long long i = 0; i < count; ++i) codes[i] = qsim_encode_one(x[i], 0.0f, 1.0f, k);
}
""",
    ),
    "cast": (
        CAST,
        """
extern "C" __global__ void qsim_sample(const float* x, unsigned char* codes, long long count, const int* of)
{
    QsimRules k;
    unsigned* fields = &k.mantissa_bits;
    for (int i = 0; i < 21; ++i) fields[i] = (unsigned)of[i];
    for (long long i = 0; i < count; ++i)
        codes[i] = (unsigned char)qsim_cast_one(__float_as_uint(x[i]), 0u, false, k).code;
}
""",
    ),
}
STRATA = 512
CELLS = 1 << 16  # of 128 neighbouring mantissas each: one is drawn in each cell
EDGES = np.add.outer(np.arange(1 << 14, dtype=np.uint32) << 9, np.array([0, 1, 256, 511], np.uint32)).reshape(-1)
EACH = CELLS + EDGES.size


@cache
def built(name, old="", new=""):
    kernel, loop = LOOPS[name]
    assert not old or kernel.text.count(old) == 1
    return host.build((kernel.text.replace(old, new) if old else kernel.text) + loop, "qsim_sample")


def patterns(strata, rng):
    """float32 [strata, 2^17]: sign and exponent are the index of the stratum."""
    mantissas = np.empty((len(strata), EACH), np.uint32)
    cells = np.arange(CELLS, dtype=np.uint32) << 7
    mantissas[:, :CELLS] = rng.integers(0, 128, (len(strata), CELLS), dtype=np.uint8) | cells
    mantissas[:, CELLS:] = EDGES
    return (mantissas | (np.asarray(strata, np.uint32) << 23)[:, None]).view(np.float32)


def numbers(name, fmt, policy):
    given = params(fmt, policy) if name == "encode" else rule_words(fmt, policy)
    return np.array(given, np.int64).astype(np.int32)


def coded(loop, x, of):
    """Codes of x by the loop; bytes that it leaves out are 0xEE."""
    codes = np.full(x.size, 0xEE, np.uint8)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, codes)]
    loop((1,), (1,), [*pointers, ctypes.c_longlong(x.size), ctypes.c_void_p(of.ctypes.data)])
    return codes


def agree(x, loop, made):
    for name, policy in CASES:
        fmt = FORMATS[name]
        expected = encode(x, fmt, policy=policy)
        assert_codes_equal(expected, coded(made, x, numbers(loop, fmt, POLICIES[policy])), x)


def test_a_stratified_sample_of_two_to_the_26_gets_the_codes_of_the_cpu():
    """Every sign and exponent (512 strata, subnormals, Inf and NaN among them) has 2^17 patterns, 2^26 in all.

    Half of a stratum's are drawn, one uniformly from each of the 2^16 cells of 128 neighbouring mantissas; half are at
    fixed places of the 2^14 cells of 512 mantissas: the first two, the middle, the last. So every value and tie of the
    formats, where the mantissa ends in 19 zeros or more, is there with both its neighbours. Each of the 2^26 is encoded
    to E4M3FN and E5M2, saturating and not, and to E2M1, by the function of encode.cu and by that of cast.cu.
    """
    rng = np.random.default_rng(20260104)
    total = 0
    for first in range(0, STRATA, 8):
        x = patterns(range(first, first + 8), rng).reshape(-1)
        total += x.size
        for loop in LOOPS:
            agree(x, loop, built(loop))
    assert total == 2**26


def test_the_sample_is_what_it_says():
    strata = [0, 1, 255, 256, 300, 511]
    words = patterns(strata, np.random.default_rng(1)).view(np.uint32)
    assert words.shape == (6, 2**17)
    assert (words >> 23 == np.array(strata)[:, None]).all()
    drawn, fixed = words[:, :CELLS] & 0x7FFFFF, words[:, CELLS:] & 0x7FFFFF
    assert (drawn >> 7 == np.arange(2**16)).all()
    assert len(np.unique(drawn & 127)) == 128
    assert len(np.unique(drawn[:, 0])) > 1
    assert {0, 1, 256, 511} == set((fixed & 511).reshape(-1).tolist())
    assert (np.bincount(fixed[0] >> 9) == 4).all()


@pytest.mark.parametrize(
    ("loop", "old", "new"),
    [
        ("encode", "+ odd) >> drop", "+ 1u) >> drop"),  # ties away from zero
        ("encode", "wanted < 25 ? wanted : 25", "wanted < 24 ? wanted : 24"),  # values below half round up
        ("encode", "code > k.max_code", "code >= k.max_code + 2u"),
        ("encode", "(negative ? k.negative_nan_code : k.nan_code)", "k.nan_code"),
        ("cast", " - (k.even & even)", ""),
        ("cast", "field > k.lowest ? field : k.lowest", "field"),
        ("cast", "negative ? k.negative_nan : k.nan", "k.nan"),
        ("cast", "is_nan = magnitude > 0x7F800000u", "is_nan = magnitude > 0x7F800001u"),
    ],
)
def test_a_wrong_function_is_caught_by_a_smaller_sample(loop, old, new):
    x = patterns([0, 111, 116, 127, 129, 135, 142, 255, 373, 511], np.random.default_rng(2)).reshape(-1)
    agree(x, loop, built(loop))
    with pytest.raises(AssertionError, match="codes differ, first at"):
        agree(x, loop, built(loop, old, new))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_every_code_is_decoded_in_every_place_of_a_group(name):
    fmt = FORMATS[name]
    row = np.arange(fmt.code_count, dtype=np.uint8)
    codes = np.stack([np.roll(row, r) for r in range(16)])
    expected = decode(codes, fmt)
    expected[np.isnan(expected)] = np.uint32(0x7FC00000).view(np.float32)
    table = np.array(decode_table(fmt)[: fmt.code_count])
    assert expected.tobytes() == decode_codes(HOST, codes, table).tobytes()
    ones = np.ones(16, np.float32)
    assert expected.tobytes() == decode_codes(HOST, codes, table, descale=ones).tobytes()
