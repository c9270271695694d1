"""The CUDA cast of any format and rounding: compiled for every target, and emulated equal to the CPU backend."""

import numpy as np
import pytest

from cuda_kernels._place import HOST
from cuda_kernels.cast import CAST, RULES, cast
from qsim.backends import CastSpec, get_backend
from qsim.codec import encode
from qsim.codec.general import rule_words
from qsim.codec.general_kernels import Rules
from qsim.formats import FORMATS, POLICIES, RoundMode
from qsim.philox import RandomStream
from tests.places import launch
from tests.unit.test_cuda_encode import from_bits, random_patterns

NUMBA = get_backend("numba")
SPECIAL = from_bits(
    0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F7FFFFF, 0x00800000
)


def stream_words(streams):
    return np.array([[*s.key(), *s.counter()] for s in streams], np.uint32)


def probe(fmt, count=6000):
    """Random patterns, and numbers about every value and midpoint of the format."""
    values = np.unique([fmt.magnitude(code) for code in range(min(fmt.max_code + 1, 255))])
    near = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))])
    return np.concatenate([random_patterns()[:count], near, -near, SPECIAL])


def test_the_struct_has_the_fields_of_the_cpu_rules():
    assert RULES == len(Rules._fields)
    declared = CAST.text.split("struct QsimRules {")[1].split("}")[0]
    names = declared.replace("unsigned", "").replace(";", "").replace("is_signed", "signed").split(",")
    assert [name.strip() for name in names] == list(Rules._fields)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("mode", [m for m in RoundMode if m is not RoundMode.STOCHASTIC], ids=lambda m: m.value)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_emulated_codes_equal_the_codec_in_every_rounding(fmt, mode):
    x = probe(fmt)
    for name in ("ocp", "ml_dtypes", "torch"):
        policy = POLICIES[name].with_choices(rounding=mode)
        expected = encode(x, fmt, policy=policy)
        assert expected.tobytes() == launch(cast, x, rule_words(fmt, policy)).codes.tobytes(), name


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("bits", [1, 7, 24, 32])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"])
def test_emulated_stochastic_rounding_draws_the_same_words(name, bits):
    fmt, policy = FORMATS[name], POLICIES["ocp"].with_choices(rounding="stochastic", random_bits=bits)
    x, stream = probe(fmt, 2001), RandomStream(seed=2**40 + 7, step=3, layer=5, role=9)
    expected = encode(x, fmt, policy=policy, stream=stream)
    assert (
        expected.tobytes() == launch(cast, x, rule_words(fmt, policy), streams=stream_words([stream])).codes.tobytes()
    )


CASES = [((3, 5, 17), 1, None), ((3, 5, 17), 1, (1, 1, 17)), ((3, 5, 17), 1, (3, 1, 1)), ((3, 5, 17), 1, (3, 5, 1)),
         ((900,), 0, None), ((5, 1), 1, (5, 1)), ((2, 0), 1, None), ((1, 4099), 0, (1, 4099))]  # fmt: skip


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("mode", ["nearest_even", "up", "odd", "stochastic"])
@pytest.mark.parametrize(("shape", "lead", "own"), CASES)
def test_emulated_casts_amax_and_counts_equal_the_cpu_backend(shape, lead, own, mode):
    rng = np.random.default_rng(len(shape))
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    flat[rng.choice(flat.size, flat.size // 3, replace=False)] = rng.choice(SPECIAL, flat.size // 3)
    scale = np.float32(rng.choice([1e-38, 0.7, 100, 3e38], shape[0])) if lead else np.asarray(100, np.float32)
    center = None if own is None else rng.standard_normal(own).astype(np.float32)
    if center is not None and x.size:
        x[..., -1] = np.broadcast_to(center, shape)[..., -1]  # a residual of 0 is not flushed
    replicas = shape[0] if lead else 1
    for fmt in (FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2fnuz"], FORMATS["float4_e2m1fn"]):
        policy = POLICIES["cuda"].with_choices(rounding=mode)
        streams = tuple(RandomStream(seed=1, worker=r) for r in range(replicas)) if mode == "stochastic" else ()
        expected = NUMBA.quantize(x, scale, center, CastSpec(fmt=fmt, policy=policy, streams=streams))
        got = launch(cast, x, rule_words(fmt, policy), scale=scale, center=center,
                           streams=stream_words(streams) if streams else None)  # fmt: skip
        assert expected.codes.tobytes() == got.codes.tobytes()
        assert expected.amax.tobytes() == got.top.view(np.float32).tobytes()
        counts = expected.counts
        for i, name in enumerate(("saturated", "flushed", "nan", "inf")):
            assert (getattr(counts, name) == got.counts[..., i].astype(np.int64)).all(), name


@pytest.mark.usefixtures("gpp")
def test_what_a_policy_refuses_is_counted():
    policy = POLICIES["ocp"].with_choices(overflow="raise", nan="raise")
    x = np.float32([1, 1000, np.nan, np.inf, -1000])
    assert 4 == launch(cast, x, rule_words(FORMATS["float8_e4m3fn"], policy)).counts[4]


def test_wrong_arguments_are_named():
    x, own = np.zeros((2, 3), np.float32), rule_words(FORMATS["float8_e4m3fn"], POLICIES["ocp"])
    for call, message in (
        (lambda: cast(HOST, x.astype(np.float64), own), "x is numpy.ndarray of float64"),
        (lambda: cast(HOST, x, own.astype(np.int64)), "rules is numpy.ndarray of int64"),
        (lambda: cast(HOST, x, None), "rules is builtins.NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for call, message in (
        (lambda: cast(HOST, x, own[:5]), "21 numbers"),
        (lambda: cast(HOST, x, own, scale=np.ones(3, np.float32)), "leading axis"),
        (lambda: cast(HOST, x, own, streams=np.zeros((3, 5), np.uint32)), "streams 5 for each of 1"),
        (lambda: cast(HOST, x, own, center=np.zeros(2, np.float32)), "does not broadcast"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
