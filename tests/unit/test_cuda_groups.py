"""Groups of 16 bytes in the CUDA encode, cast and decode: the same bits for every length, address and centre."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from cuda_kernels import host
from cuda_kernels._kernel import Kernel
from cuda_kernels._place import HOST, Host
from cuda_kernels.cast import CAST, cast
from cuda_kernels.decode import DECODE, decode
from cuda_kernels.encode import ENCODE, encode
from qsim.backends import CastSpec, get_backend
from qsim.codec.general import rule_words
from qsim.codec.tables import decode_table
from qsim.formats import FORMATS, POLICIES
from qsim.philox import RandomStream
from tests.places import Given
from tests.unit.test_cuda_cast import stream_words
from tests.unit.test_cuda_encode import params, random_patterns

NUMBA = get_backend("numba")
FMT, POLICY = FORMATS["float8_e4m3fn"], POLICIES["ocp"]
DRAWN = POLICY.with_choices(rounding="stochastic")
TABLE = np.array(decode_table(FMT)[:256])
pytestmark = pytest.mark.usefixtures("gpp")


@dataclass(frozen=True, slots=True)
class Shifted(Host):
    """The emulation, whose arrays to fill begin ``shift`` items behind an address that 64 divides."""

    shift: int = 0

    def empty(self, shape, dtype):
        return moved(super(Shifted, self).empty(shape, dtype), self.shift * np.dtype(dtype).itemsize)


def moved(array, by):
    """A copy whose first byte lies ``by`` bytes behind an address that 64 divides, between bytes of 0xEE."""
    room = np.full(array.nbytes + 192, 0xEE, np.uint8)
    start = -room.ctypes.data % 64 + 64 + by
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert array.size == 0 or view.ctypes.data % 64 == by % 64
    return view


def around(view):
    """The bytes of ``moved`` that are not the view's."""
    room = view
    while room.base is not None:
        room = room.base
    start = view.ctypes.data - room.ctypes.data
    return np.concatenate([room[:start], room[start + view.nbytes :]])


def operands(shape, own):
    rng = np.random.default_rng(shape[-1])
    x = random_patterns()[: int(np.prod(shape))].reshape(shape)
    center = None if own is None else rng.standard_normal(own).astype(np.float32)
    return x, np.float32(rng.choice([0.7, 100, 3e5], shape[0])), center


def assert_same(expected, actual):
    """The same bytes; pytest's own comparison of long ones takes seconds where they differ."""
    left, right = (np.frombuffer(array.tobytes(), np.uint8) for array in (expected, actual))
    assert left.size == right.size
    differing = np.flatnonzero(left != right)
    assert differing.size == 0, f"{differing.size} of {left.size} bytes differ, first at {differing[0]}"


def all_agree(x, scale, center, *, place=HOST, shift=0, made=None):
    """encode, cast and decode of x, moved by ``shift`` bytes, are those of the CPU backend."""
    spec = CastSpec(fmt=FMT, policy=POLICY)
    streams = tuple(RandomStream(seed=3, worker=r) for r in range(len(x)))
    codes = NUMBA.quantize(x, scale, center, spec).codes
    drawn = NUMBA.quantize(x, scale, center, CastSpec(fmt=FMT, policy=DRAWN, streams=streams))
    values = NUMBA.decode(codes, scale, center, spec)
    own = moved(x, shift)
    encoded = encode(place, own, params(FMT, POLICY), scale=scale, center=center)
    assert_same(codes, encoded)
    got = cast(place, own, rule_words(FMT, DRAWN), scale=scale, center=center, streams=stream_words(streams))
    assert_same(drawn.codes, got.codes)
    assert_same(drawn.amax, got.top)
    decoded = decode(place, moved(codes, shift), TABLE, descale=scale, center=center)
    assert_same(values, decoded)
    return encoded, decoded


@pytest.mark.parametrize("own", [None, (1, 1), (3, 1), "row", "rows"])
def test_every_length_gives_the_bits_of_the_cpu(own):
    for size in range(71):
        shapes = {"row": (1, size), "rows": (3, size)}
        all_agree(*operands((3, size), shapes.get(own, own)))


@pytest.mark.parametrize("shape", [(2, 1), (2, 5), (1, 16), (3, 37), (2, 64)])
@pytest.mark.parametrize("shift", range(16))
def test_every_address_gives_the_bits_of_the_cpu_and_nothing_beside_is_written(shift, shape):
    for out in range(0, 16, 3) if shape == (3, 37) else (0, 1, 2, 4):
        place = Shifted(shift=out)
        for own in (None, (shape[0], 1), (1, shape[1])):
            for result in all_agree(*operands(shape, own), place=place, shift=shift):
                assert set(around(result)) == {0xEE}


@pytest.mark.parametrize("own", [(4, 5), (1, 5), (4, 1), (5,), (2, 4, 1), (2, 1, 5)])
def test_a_centre_begins_again_in_the_middle_of_a_group(own):
    all_agree(*operands((2, 4, 5), own))


def test_the_place_of_a_centre_does_not_matter():
    x, scale, center = operands((3, 37), (1, 37))
    for by in range(9):
        all_agree(x, scale, moved(center, by))


def several_agree(place):
    for size in (3, 5, 37, 3500):  # the last one goes round the grid
        all_agree(*operands((3, 2, size), (1, 1, size)), place=place)


def test_a_grid_that_goes_round_gives_the_bits_of_the_cpu():
    several_agree(HOST)


@cache
def built(kernel, *changes):
    text = kernel.text
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return host.build(text, kernel.entry)


@dataclass(frozen=True, slots=True)
class Wrong(Shifted):
    """A place where one kernel is the one that the test built."""

    kernel: Kernel = ENCODE
    made: host.HostKernel | None = None

    def built(self, kernel):
        return self.made if kernel == self.kernel else super(Wrong, self).built(kernel)


def alone(size, width, offset):
    """Which elements of a row move one by one if it begins ``offset`` elements behind an aligned group of ``width``."""
    first = (np.arange(size) + offset) // width * width - offset
    return (first < 0) | (first + width > size)


def test_whole_groups_are_read_at_once_and_the_others_one_by_one():
    one_by_one = "size ? row[j + e] : 0.0f"
    x, scale, _ = operands((5, 37), None)
    right = encode(HOST, x, params(FMT, POLICY), scale=scale)
    place = Given(made=built(ENCODE, one_by_one, "size ? -row[j + e] : 0.0f"))
    for shift in range(0, 16, 4):
        got = encode(place, moved(x, shift), params(FMT, POLICY), scale=scale)
        for r in range(5):
            expected = alone(37, 4, (37 * r + shift // 4) % 4)
            assert (expected == ((right ^ got)[r] == 0x80))[~np.isnan(x[r])].all()
    place = Given(made=built(CAST, one_by_one, "size ? -row[j + e] : 0.0f"))
    got = cast(place, x, rule_words(FMT, POLICY), scale=scale).codes
    for r in range(5):  # a draw belongs to four elements from the row's own beginning, so a row that is off moves alone
        expected = alone(37, 4, 0) | (r % 4 != 0)
        assert (expected == ((right ^ got)[r] == 0x80))[~np.isnan(x[r])].all()


def test_whole_groups_of_codes_are_read_at_once_and_the_others_one_by_one():
    codes = np.random.default_rng(0).integers(0, 126, (5, 57)).astype(np.uint8)
    right = decode(HOST, codes, TABLE)
    place = Given(made=built(DECODE, "(unsigned)row[j + e] <<", "(row[j + e] ^ 0x80u) <<"))
    for shift in range(16):
        got = decode(place, moved(codes, shift), TABLE, descale=np.ones(5, np.float32))
        for r in range(5):
            expected = alone(57, 16, (57 * r + shift) % 16)
            assert (expected == ((right[r] != got[r]) | (codes[r] == 0) & np.signbit(got[r]))).all()


@pytest.mark.parametrize(
    ("kernel", "bytes_at_once", "what", "more"),
    [
        (CAST, 16, "const float4 four", ()),
        (CAST, 4, "*reinterpret_cast<uchar4*>", ()),
        (DECODE, 16, "*reinterpret_cast<float4*>", ()),
        (DECODE, 16, "const uint4 four", ("qsim_offset(row, 1)", "0")),
    ],
)
def test_a_group_at_an_address_that_cannot_take_it_ends_the_run(kernel, bytes_at_once, what, more, capfd):
    guard = f"qsim_aligned(row + j, {bytes_at_once})) {{\n        {what}"
    made = built(kernel, guard, guard.replace(str(bytes_at_once), "1", 1), *more)
    place = Wrong(kernel=kernel, made=made, shift=1)
    with pytest.raises(host.EmulationError, match="did not finish"):
        all_agree(*operands((3, 37), None), place=place, shift=4)
    assert f"moves {bytes_at_once} bytes at once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        (ENCODE, "j + e < size ? row[j + e]", "j + e < size - 1 ? row[j + e]"),
        (ENCODE, "at + 1 == period ? 0 : at + 1", "at + 1 == period ? at : at + 1"),
        (ENCODE, "at = (j > 0 ? j : 0) % period", "at = 0"),
        (ENCODE, "!row || j < 0 ||", "!row ||"),
        (ENCODE, "j += 4 * stride", "j += 8 * stride"),
        (CAST, "group += stride", "group += 2 * stride"),
        (CAST, "four[e] = (unsigned char)result.code", "four[3 - e] = (unsigned char)result.code"),
        (DECODE, "j += 16 * stride", "j += 32 * stride"),
        (DECODE, "words[0] = four.x", "words[0] = four.y"),
        (DECODE, "j + 4 * w + e, per_replica", "j + 4 * w, per_replica"),
    ],
)
def test_a_wrong_text_is_caught(kernel, old, new):
    place = Wrong(kernel=kernel, made=built(kernel, old, new))
    with pytest.raises(AssertionError):
        several_agree(place)


def test_places_behind_the_end_are_not_counted():
    x, scale = np.ones((1, 5), np.float32), np.full(1, np.inf, np.float32)
    policy = POLICY.with_choices(nan="raise", overflow="saturate")
    assert [0] == cast(HOST, x, rule_words(FMT, policy), scale=scale).counts[:, 4].tolist()
    wrong = built(CAST, "if (first + e >= per_replica) break;", "")  # 0 * Inf
    assert [3] == cast(Given(made=wrong), x, rule_words(FMT, policy), scale=scale).counts[:, 4].tolist()
