"""Captures read and refused, and replays as pure functions of seed and operation."""

import json
import pickle
import zipfile
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import save_file

from qsim._paths import sample_capture
from qsim.arrays import same_bits
from qsim.errors import InputError, StudyError
from qsim.philox import Purpose, random_bell, random_order
from qsim.quant import OpId, Site, TensorRole
from qsim.sim import Linear, Scores
from qsim.workloads import Replay, Shaping, read_capture
from qsim.workloads.replay import load_capture

INPUT, WEIGHT, GRAD, Q, K, *_ = (int(role) for role in TensorRole)
QKV, SCORES, UP, DOWN, *_ = (int(site) for site in Site)


def arrays(steps=(0, 1), layers=(0, 1), names=("qkv_in", "q", "k"), tokens=4, channels=6):
    """A capture's arrays, every value its own."""
    keys = [f"step{s}.L{layer}.{name}" for s, layer, name in product(steps, layers, names)]
    size = tokens * channels
    return {
        key: (np.arange(size, dtype=np.float32) + size * i - 99.5).reshape(tokens, channels)
        for i, key in enumerate(keys)
    }


def written(folder, content, suffix=".npz"):
    path = folder / f"capture{suffix}"
    np.savez(path, **content) if suffix == ".npz" else save_file(content, path)
    return path


# ---- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_capture_comes_back_bit_for_bit_and_read_only(tmp_path, suffix):
    content = arrays(steps=(3, 10), layers=(1, 5))
    got = read_capture(written(tmp_path, content, suffix))
    assert ((3, 10), (1, 5), ("qkv_in", "q", "k"), 4) == (got.steps, got.layers, got.names, got.tokens)
    assert (f"capture{suffix}", ()) == (got.source, got.ignored)
    assert len(content) == len(got.activations)
    for (step, layer, name), x in got.activations.items():
        assert same_bits(content[f"step{step}.L{layer}.{name}"], x)
        assert not x.flags.writeable


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_half_widens_and_double_rounds_once(tmp_path, suffix, dtype):
    x = np.array([[1 + 2.0**-24 + 2.0**-40, 0.1, -0.0, 6e-8]], dtype)
    got = read_capture(written(tmp_path, {"step0.L0.qkv_in": x}, suffix)).activations[0, 0, "qkv_in"]
    assert same_bits(np.array([[np.float32(v) for v in x[0].tolist()]], np.float32), got)
    if dtype is np.float64:
        assert got[0, 0] == np.float32(1 + 2.0**-23)  # above the tie; by way of anything shorter it would be 1


def bfloat16_file(path, patterns):
    payload = np.array(patterns, "<u2").tobytes()
    header = b'{"step0.L0.qkv_in":{"dtype":"BF16","shape":[2,%d],"data_offsets":[0,%d]}}'
    header %= len(patterns) // 2, len(payload)
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def test_bfloat16_widens_exactly(tmp_path):
    patterns = [0x0000, 0x8000, 0x0001, 0x3F80, 0xC049, 0x7F7F]
    bfloat16_file(tmp_path / "b.safetensors", patterns)
    got = read_capture(tmp_path / "b.safetensors").activations[0, 0, "qkv_in"]
    assert [[p << 16 for p in patterns[:3]], [p << 16 for p in patterns[3:]]] == got.view(np.uint32).tolist()


def test_big_endian_arrays_are_read_by_value(tmp_path):
    content = {"step0.L0.qkv_in": np.array([[1.5, -2]], ">f4")}
    assert [[1.5, -2.0]] == read_capture(written(tmp_path, content)).activations[0, 0, "qkv_in"].tolist()


def test_the_shipped_sample_is_24_steps_of_4_layers():
    got = load_capture(sample_capture())
    assert (tuple(range(24)), (0, 1, 3, 5), ("qkv_in", "q", "k"), 8) == (got.steps, got.layers, got.names, got.tokens)
    assert [148, 192] == [got.distinct_rows(layer, "qkv_in") for layer in (0, 1)]
    assert load_capture(sample_capture()) is got


def test_other_names_are_left_alone_and_listed(tmp_path):
    extra = {
        "token_ids": np.arange(3),
        "L0.qkv_in": np.ones((4, 6), np.float32),
        "step0.L0.qkv_in.weight": np.ones((4, 6), np.float32),
        "step0.L0.other": np.ones(3, np.float32),
    }
    for suffix in (".npz", ".safetensors"):
        got = read_capture(written(tmp_path, arrays() | extra, suffix))
        assert tuple(sorted(extra)) == got.ignored
        assert len(got.activations) == 12


# ---- refusals -------------------------------------------------------------------------------------------


def changed(key, value, **options):
    content = arrays(**options)
    content[key] = value
    return content


def at_0_1(value, dtype=np.float64):
    x = np.ones((4, 6), dtype)
    x[0, 1] = value
    return x


ONE, KEY = np.ones((4, 6), np.float32), "step1.L0.qkv_in"
GRADS = {f"step{s}.L{layer}.qkv_in.grad_output": np.ones((4, 3), np.float32) for s in (0, 1) for layer in (0, 1)}
LAST_GRAD = "step1.L1.qkv_in.grad_output"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": ONE}, "no activation in it; .* found x"),
        ({}, "no activation in it; .* found none"),
        (changed(KEY, np.ones((4, 6), np.int32)), f"{KEY} is no float tensor"),
        (changed(KEY, np.ones((4, 6), bool)), f"{KEY} is no float tensor"),
        (changed(KEY, at_0_1(np.nan)), rf"{KEY} holds nan at \[0, 1\]"),
        (changed(KEY, at_0_1(-np.inf, np.float16)), rf"{KEY} holds -inf at \[0, 1\]"),
        (changed(KEY, at_0_1(3.5e38)), rf"{KEY} holds inf at \[0, 1\]; a capture must be finite float32"),
        (changed(KEY, np.ones(24, np.float32)), rf"{KEY} has shape \[24\]; expected \[tokens, channels\]"),
        (changed(KEY, np.ones((4, 0), np.float32)), r"has shape \[4, 0\]; .* neither empty"),
        (changed("step2.L0.qkv_in", ONE), "step2.L1.qkv_in is missing; every name needs every step and layer"),
        (changed("step0.L2.q", ONE), "step0.L2.qkv_in is missing"),
        (changed("step0.L0.gelu", ONE), "step0.L1.gelu is missing"),
        (changed(KEY, ONE[:3]), f"{KEY} has 3 tokens, others have 4"),
        (changed(KEY, ONE[:, :5]), f"{KEY} has 5 channels, others have 6"),
        (changed("step01.L0.qkv_in", ONE), "step01.L0.qkv_in is there twice"),
        (arrays(names=("qkv_in", "q")), "q and k are multiplied with each other"),
        (arrays(names=("k",)), "q and k are multiplied with each other"),
        (arrays(names=("q",)) | arrays(names=("k",), channels=5), "with equal channels"),
        (changed("L1.qkv_in.weight", np.ones((5, 3), np.float32)), r"L1.qkv_in.weight is \[5, 3\]; .* 6 channels"),
        (arrays() | dict(list(GRADS.items())[:3]), "grad_output arrays must be there for every step and layer"),
        (arrays() | {"step0.L0.gelu.grad_output": ONE}, "grad_output arrays must be there"),
        (arrays() | GRADS | {LAST_GRAD: ONE[:2, :3]}, rf"{LAST_GRAD} is \[2, 3\]; expected \[4, 3\]"),
        (arrays() | GRADS | {LAST_GRAD: ONE}, rf"{LAST_GRAD} is \[4, 6\]; expected \[4, 3\]"),
        (arrays() | GRADS | {"L1.qkv_in.weight": ONE[:1].T.repeat(5, 1)}, r"is \[4, 3\]; expected \[4, 5\]"),
    ],
)
def test_unusable_arrays_are_refused_by_name(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(InputError, match=message) as refused:
        read_capture(path)
    assert str(path) in str(refused.value)
    assert refused.value.exit_code == 3


def bare_array(path):
    with path.open("wb") as file:
        np.save(file, ONE)


def raw_member(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("step0.L0.qkv_in", "not an array")


def unknown_compression(path):
    written(path.parent, arrays())
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 10] = 77  # the method field of the last file in the directory
    data[data.rindex(b"PK\x03\x04") + 8] = 77
    path.write_bytes(data)


def corrupt_stream(path):
    np.savez_compressed(path, **arrays())
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x03\x04") + 30 + len("step0.L0.qkv_in.npy") + 20
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("missing.npz", lambda path: None, "no such file"),
        ("folder.npz", lambda path: path.mkdir(), "no such file"),
        ("n" * 300 + ".npz", lambda path: None, "no such file"),
        ("capture.pt", lambda path: path.write_bytes(b"x"), r'"\.pt" is not a capture format'),
        ("capture", lambda path: path.write_bytes(b"x"), '"" is not a capture format'),
        ("pickle.npz", lambda path: path.write_bytes(pickle.dumps({"a": 1})), "without pickles"),
        ("object.npz", lambda path: np.savez(path, **{KEY: np.array([{}, 1], object)}), "without pickles"),
        ("bare.npz", bare_array, "without pickles"),
        ("empty.npz", lambda path: path.write_bytes(b""), "without pickles"),
        ("raw.npz", raw_member, "step0.L0.qkv_in is no float tensor"),
        ("capture.npz", unknown_compression, "without pickles"),
        ("stream.npz", corrupt_stream, "without pickles"),
        ("empty.safetensors", lambda path: path.write_bytes(b""), r"cannot be read as \.safetensors"),
        ("noise.safetensors", lambda path: path.write_bytes(bytes(range(200))), r"cannot be read as \.safetensors"),
        ("int.safetensors", lambda path: save_file({KEY: ONE.astype(np.int8)}, path), "is no float tensor"),
    ],
)
def test_a_file_that_is_no_capture_is_an_input_error(tmp_path, name, make, message):
    path = tmp_path / name
    make(path)
    with pytest.raises(InputError, match=message):
        read_capture(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_every_truncation_is_an_input_error(tmp_path, suffix):
    path = written(tmp_path, arrays(), suffix)
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match="cannot be read"):
            read_capture(path)


# ---- replay ---------------------------------------------------------------------------------------------


def captured(folder, **extra):
    content = arrays(steps=(0, 1, 2), names=("qkv_in", "q", "k", "ffn_in"), tokens=16)
    return read_capture(written(folder, content | extra))


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("capture"))


def replay(capture, *, seeds=(5, 6, 7), layers=2, microbatches=2, **shaping):
    return Replay(capture, shaping=Shaping(**shaping), seeds=seeds, layers=layers, microbatches=microbatches)


OPS = [
    OpId(step, microbatch, layer, site, role)
    for step, microbatch, layer in product(range(4), range(2), range(2))
    for site, role in ((QKV, INPUT), (SCORES, Q), (SCORES, K), (UP, INPUT), (QKV, WEIGHT), (UP, WEIGHT))
]


def test_tensors_do_not_depend_on_the_order_of_loading(capture):
    forwards, backwards = replay(capture), replay(capture)
    first = {op: forwards.load(op) for op in OPS}
    assert all(same_bits(backwards.load(op), first[op]) for op in reversed(OPS))
    assert not first[OPS[0]].flags.writeable


def test_a_replica_does_not_depend_on_the_other_seeds(capture):
    many, alone, turned = replay(capture), replay(capture, seeds=(6,)), replay(capture, seeds=(6, 2**63, 5))
    for op in OPS:
        assert same_bits(many.load(op)[1:2], alone.load(op))
        assert same_bits(many.load(op)[1:2], turned.load(op)[:1])
        assert same_bits(many.load(op)[:1], turned.load(op)[2:])


def picked(capture, x, layer, name):
    """(step, row) of every row of x: rows of the capture are all different."""
    rows = {capture.activations[s, layer, name][r].tobytes(): (s, r) for s in capture.steps for r in range(16)}
    return [rows[row.tobytes()] for row in x]


def test_a_pass_draws_one_step_and_the_same_rows_in_every_layer_and_role(capture):
    made = replay(capture)
    for replica, step, microbatch in product(range(3), range(4), range(2)):
        found = {
            (layer, name): picked(capture, made.load(OpId(step, microbatch, layer, site, role))[replica], layer, name)
            for layer in (0, 1)
            for name, site, role in (("qkv_in", QKV, INPUT), ("q", SCORES, Q), ("k", SCORES, K), ("ffn_in", UP, INPUT))
        }
        first = found[0, "qkv_in"]
        assert all(rows == first for rows in found.values())
        order = random_order((5, 6, 7)[replica], Purpose.ORDER, 3)
        assert {int(order[(2 * step + microbatch) % 3])} == {s for s, _ in first}
        assert len(first) == Shaping().tokens


def test_other_steps_microbatches_and_seeds_draw_other_rows(capture):
    made = replay(capture)
    rows = {
        tuple(r for _, r in picked(capture, made.load(OpId(step, microbatch))[replica], 0, "qkv_in"))
        for replica, step, microbatch in product(range(3), range(4), range(2))
    }
    assert len(rows) == 3 * 4 * 2


def test_rows_are_drawn_evenly_with_replacement(capture):
    made = replay(capture, seeds=(1,), tokens=4096)
    rows = [r for _, r in picked(capture, made.load(OpId(0))[0], 0, "qkv_in")]
    counts = np.bincount(rows, minlength=16)
    assert (abs(counts - 256) < 5 * np.sqrt(256)).all()


def test_layer_spread_is_an_exact_power_of_two(capture):
    plain, spread = replay(capture), replay(capture, layer_spread=(3, -5))
    for op in OPS:
        if op.role_id != WEIGHT:
            factor = np.float32(2.0 ** (3, -5)[op.layer_id])
            assert same_bits(plain.load(op) * factor, spread.load(op))
        else:
            assert same_bits(plain.load(op), spread.load(op))


def test_outlier_steps_alone_are_multiplied(capture):
    plain, out = replay(capture), replay(capture, outlier_steps=(1, 3), outlier_factor=8.0)
    for op in OPS:
        factor = np.float32(8 if op.logical_step in (1, 3) and op.role_id != WEIGHT else 1)
        assert same_bits(plain.load(op) * factor, out.load(op))


def test_mean_shift_adds_that_many_sigma_of_the_whole_step(capture):
    plain, moved = replay(capture), replay(capture, mean_shift=4.0)
    for op in OPS[:4]:
        name = {(QKV, INPUT): "qkv_in", (SCORES, Q): "q", (SCORES, K): "k", (UP, INPUT): "ffn_in"}[op.site, op.role_id]
        step = picked(capture, plain.load(op)[0], op.layer_id, name)[0][0]
        sigma = np.std(capture.activations[step, op.layer_id, name].astype(np.float64))
        assert same_bits(plain.load(op)[0] + np.float32(4 * sigma), moved.load(op)[0])


@pytest.mark.parametrize("shift", [0.5, 2.0, 8.0])
def test_mean_shift_gives_k_near_the_shift_on_the_shipped_sample(shift):
    made = replay(load_capture(sample_capture()), mean_shift=shift, layers=4, tokens=64)
    for layer in range(4):
        x = made.load(OpId(0, 0, layer, SCORES, Q)).astype(np.float64)
        k = np.abs(x.mean(axis=(1, 2))) / x.std(axis=(1, 2))
        assert (np.abs(k - shift) < 0.2 + 0.15 * shift).all(), k


def test_shaping_describes_only_what_it_does():
    assert Shaping().describe() == Shaping(layer_spread=(0, 0)).describe() == ""
    full = Shaping(mean_shift=2, layer_spread=(1, 0), outlier_steps=(3,), outlier_factor=16)
    assert full.describe() == "mean_shift 2 sigma, layer_spread 2^[1, 0], outlier_steps [3] x16"


def test_seeded_weights_are_bells_over_the_square_root_of_the_fan_in_and_never_move(capture):
    made = replay(capture, outputs=5)
    first = made.load(OpId(0, 0, 1, UP, WEIGHT))
    assert first.shape == (3, 6, 5)
    for replica, seed in enumerate((5, 6, 7)):
        bell = random_bell(seed, Purpose.WEIGHTS, (6, 5), layer=1, site=UP)
        assert same_bits(bell * np.float32(1 / np.sqrt(6.0)), first[replica])
    assert all(same_bits(first, made.load(OpId(s, m, 1, UP, WEIGHT, w))) for s, m, w in ((1, 0, 0), (3, 1, 1)))
    assert not same_bits(first, made.load(OpId(0, 0, 0, UP, WEIGHT)))
    assert not same_bits(first, made.load(OpId(0, 0, 1, QKV, WEIGHT)))


def test_real_weights_and_gradients_are_used_where_the_capture_has_them(tmp_path):
    weight = np.arange(18, dtype=np.float32).reshape(6, 3)
    grads = {
        f"step{s}.L{x}.qkv_in.grad_output": np.arange(48).reshape(16, 3) + 1000.0 * s + x
        for s, x in product(range(3), (0, 1))
    }
    capture = captured(tmp_path, **{"L1.qkv_in.weight": weight}, **grads)
    made = replay(capture, layer_spread=(4, 4), mean_shift=3.0, outlier_steps=(0,))
    assert (Linear(QKV, True), Scores(SCORES), Linear(UP, False)) == made.body
    assert same_bits(np.stack([weight] * 3), made.load(OpId(2, 0, 1, QKV, WEIGHT)))
    assert made.load(OpId(0, 0, 0, QKV, WEIGHT)).shape == (3, 6, 3)  # seeded, as wide as its gradient
    plain = replay(capture)
    for replica in range(3):
        pairs = picked(capture, plain.load(OpId(1, 1))[replica], 0, "qkv_in")
        got = made.load(OpId(1, 1, 0, QKV, GRAD))[replica]  # the rows of the input; never shaped
        assert [[1000.0 * s + 3 * r + i for i in range(3)] for s, r in pairs] == got.tolist()


def test_body_without_gradients_has_none_and_distinct_rows_are_counted(capture):
    assert (Linear(QKV, False), Scores(SCORES), Linear(UP, False)) == replay(capture).body
    assert replay(capture).distinct_rows == 48
    sample = load_capture(sample_capture())
    assert replay(sample, layers=4).distinct_rows == 148


def test_more_layers_than_captured_or_spread_are_a_study_error(capture):
    with pytest.raises(StudyError, match=r"schedule\.layers 3 is more than the 2 layers of capture\.npz"):
        replay(capture, layers=3)
    with pytest.raises(StudyError, match=r"layer_spread has 1 exponents for 2 layers"):
        replay(capture, layer_spread=(1,))


@pytest.mark.parametrize(
    "header",
    [b"((((((((", b"{'descr':'<f4','fortr", b"{'descr':'<f4','fortran_order':False,'shape':(" + b"9" * 40 + b",4)}"],
)
def test_an_archive_whose_array_header_is_damaged_is_an_input_error(header, tmp_path):
    path = tmp_path / "damaged.npz"
    text = header.ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("step0.L0.qkv_in.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(InputError, match=r"damaged\.npz: cannot be read as \.npz"):
        read_capture(path)


def test_a_safetensors_shape_that_no_array_can_have_is_an_input_error(tmp_path):
    path = tmp_path / "huge.safetensors"
    entry = {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}
    for name in ("step0.L0.qkv_in", "foreign"):
        head = json.dumps({name: entry}).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head)
        with pytest.raises(InputError, match=r"huge\.safetensors"):
            read_capture(path)
