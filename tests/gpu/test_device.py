"""What only a device can show: every float32 pattern, two streams at once, replicas as one batch. ``make gpu`` runs it.

The other tests of CUDA texts run on the device too, with QSIM_PLACE=cuda. Played (QSIM_PLACE=played) these run on a
machine without a GPU, on few patterns, to show that they can run at all.
"""

from __future__ import annotations

import numpy as np
import pytest

from cuda_kernels import DeviceUnavailableError
from cuda_kernels.cast import cast
from cuda_kernels.decode import decode
from cuda_kernels.encode import encode
from cuda_kernels.fp4_sums import fp4_sums
from qsim.codec import encode as encoded_on_cpu
from qsim.codec import pack
from qsim.codec.general import rule_words
from qsim.codec.tables import decode_table
from qsim.formats import FORMATS, POLICIES
from tests.places import is_played, launch, place
from tests.unit.test_cuda_encode import params
from tests.unit.test_cuda_fp4_sums import integers

pytestmark = pytest.mark.gpu

SHARD, PLAYED_SHARD = 1 << 26, 1 << 10


@pytest.fixture(autouse=True)
def on_a_device():
    """Skips on a machine without a device, with the reason."""
    try:
        if place().xp is np:
            pytest.skip("QSIM_PLACE=cuda runs these on the device (make gpu)")
    except DeviceUnavailableError as error:
        pytest.skip(str(error))


def shards():
    """Bit patterns, shard by shard: all 2^32 on a device, the beginning of each shard where it is played."""
    size = PLAYED_SHARD if is_played() else SHARD
    for start in range(0, 1 << 32, SHARD):
        yield np.arange(start, start + size, dtype=np.uint64).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("policy", ["cuda", "cuda_nosat"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_every_pattern_is_encoded_as_on_the_cpu(name, policy):
    fmt = FORMATS[name]
    for x in shards():
        expected = encoded_on_cpu(x, fmt, policy=policy)
        assert np.array_equal(expected, launch(encode, x, params(fmt, POLICIES[policy]))), x[0]


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fn"])
def test_every_pattern_is_cast_as_on_the_cpu(name):
    fmt, policy = FORMATS[name], POLICIES["cuda"]
    for x in shards():
        assert np.array_equal(encoded_on_cpu(x, fmt, policy=policy), launch(cast, x, rule_words(fmt, policy)).codes), x[
            0
        ]


def test_two_streams_at_once_do_not_disturb_each_other():
    here, fmt = place(), FORMATS["float8_e4m3fn"]
    rng = np.random.default_rng(1)
    x = [rng.standard_normal(999 if is_played() else 1 << 20).astype(np.float32) for _ in range(2)]
    own, table = [here.upload(a) for a in x], here.upload(decode_table(fmt))
    codes = [rng.integers(0, 16, (70, 96)).astype(np.uint8) for _ in range(2)]
    packed = [here.upload(pack(c)) for c in codes]
    streams = [here.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    here.xp.cuda.Device().synchronize()
    made = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with stream:
                cast_codes = encode(here, own[i], params(fmt, POLICIES["ocp"]))
                made[i].append((decode(here, cast_codes, table), fp4_sums(here, packed[i], packed[1 - i], 96)))
    for stream in streams:
        stream.synchronize()
    for i in range(2):
        expected = decode_table(fmt)[encoded_on_cpu(x[i], fmt)]
        for values, sums in made[i]:
            assert expected.tobytes() == values.get().tobytes()
            assert np.array_equal(integers(codes[i], codes[1 - i]), sums.get())
