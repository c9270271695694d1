"""The four operations end to end on both backends, their guards, merging of observations, and replicas."""

import dataclasses

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.oracle import OracleBackend
from qsim.errors import FormatError, ProtocolViolation, UsageError
from qsim.formats import E2M1FN, E4M3FN
from qsim.quant import (
    ANY,
    CenterAxis,
    CentredDelayedScaling,
    CurrentScaling,
    DelayedScaling,
    Layout,
    ObserveMode,
    OpId,
    QuantObservation,
    Site,
    StateKey,
    TensorRole,
    begin_logical_quantization,
    commit_quant_observation,
    decode_for_consumer,
    merge_observations,
    observe_for_future_state,
    quantize_with_snapshot,
)

ORACLE, NUMBA = OracleBackend(), NumbaBackend()
OWNER = StateKey(0, int(Site.QKV), int(TensorRole.INPUT))
PLAIN = DelayedScaling(fmt=E4M3FN, window=2)
CHANNEL = CentredDelayedScaling(fmt=E4M3FN, window=2, axis=CenterAxis.CHANNEL)
DELAYED = {
    "plain": PLAIN,
    "fp4": DelayedScaling(fmt=E2M1FN),
    "channel": CHANNEL,
    "tensor": CentredDelayedScaling(fmt=E2M1FN, observe=ObserveMode.NEXT),
}
EVERY = {**DELAYED, "current": CurrentScaling(fmt=E4M3FN)}
OBSERVED = ("amax", "count", "nan_count", "inf_count")
SUMS = ("total", "exponent", "count")
COUNTS = ("saturated", "flushed", "nan", "inf")


def tensor(step, replicas=2, shape=(5, 6)):
    """A tensor of this step: larger each step, off centre, with both zeros."""
    x = np.random.default_rng(step).standard_normal((replicas, *shape)) * 3**step + step
    x = x.astype(np.float32)
    x[:, 0, :2] = 0.0, -0.0
    return x


def lifecycle(recipe, backend, tensors, owner=OWNER):
    """Begin, quantize, observe, decode, commit for each tensor: everything that came out, as a list of steps."""
    live, out = recipe.initial(owner, tensors[0].shape[:1]), []
    for step, x in enumerate(tensors):
        op = OpId(step)
        early = None
        if isinstance(recipe, CurrentScaling):
            early = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=backend, op=op, lead=1)
        snapshot = begin_logical_quantization(live, op=op, recipe=recipe, observation=early)
        codes = quantize_with_snapshot(x, snapshot, backend=backend)
        seen = early or observe_for_future_state(x, snapshot=snapshot, recipe=recipe, backend=backend)
        decoded = decode_for_consumer(codes, op=op, backend=backend)
        live = commit_quant_observation(live, seen, recipe=recipe)
        out.append((snapshot, codes, seen, decoded, live))
    return out


def arrays_of(step):
    """Every array of one step, by name."""
    snapshot, codes, seen, decoded, live = step
    found = {"codes": codes.codes, "codes.amax": codes.amax, "decoded": decoded, "history": live.amax_history}
    found |= {f"counts.{f}": getattr(codes.counts, f) for f in COUNTS}
    found |= {f"seen.{f}": getattr(seen, f) for f in OBSERVED}
    for name, owner in (("snapshot", snapshot), ("live", live)):
        found |= {f"{name}.{f}": getattr(owner, f) for f in ("scale", "descale", "center")}
    if seen.mean is not None:
        found |= {f"mean.{f}": getattr(seen.mean, f) for f in SUMS}
    return {name: array for name, array in found.items() if array is not None}


def names_that_differ(a, b):
    return [name for name, array in a.items() if not same_bits(array, b[name])]


# ---- end to end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY)
def test_numba_and_oracle_give_the_same_bits_over_a_whole_life(recipe):
    tensors = [tensor(step) for step in range(3)]
    tensors[1][0, 2, 3] = np.nan
    tensors[2][1, 0, 0] = -np.inf
    for mine, theirs in zip(lifecycle(recipe, NUMBA, tensors), lifecycle(recipe, ORACLE, tensors), strict=True):
        assert arrays_of(mine).keys() == arrays_of(theirs).keys()
        assert [] == names_that_differ(arrays_of(mine), arrays_of(theirs))


def test_a_life_worked_out_by_hand():
    """E4M3, window 1: step 0 at scale 1, step 1 at 448 / 4 = 112."""
    first, second = np.array([[[4, -1, 0.3]]], np.float32), np.array([[[2, 1, 8]]], np.float32)
    steps = lifecycle(DelayedScaling(fmt=E4M3FN), NUMBA, [first, second])
    # 4 = 48, -1 = b8, 0.3 -> 0.3125 = 2a; 2*112 = 224 = 76, 112 = 6e, 896 saturates to 448 = 7e
    assert [[[0x48, 0xB8, 0x2A]], [[0x76, 0x6E, 0x7E]]] == [s[1].codes[0].tolist() for s in steps]
    inverse = np.float32(1) / np.float32(112)
    expected = np.array([224, 112, 448], np.float32) * inverse
    assert same_bits(np.array([[[4, -1, 0.3125]]], np.float32), steps[0][3])
    assert same_bits(expected[None, None], steps[1][3])
    assert [[0], [1]] == [s[1].counts.saturated.tolist() for s in steps]
    assert [112.0, 56.0] == [float(s[4].scale[0]) for s in steps]
    assert [(1, 1, 3), Layout.ONE_PER_BYTE, None] == [steps[0][1].shape, steps[0][1].layout, steps[0][1].scales]


def test_a_centre_is_subtracted_before_the_encode_and_added_after_the_decode():
    x = np.array([[[10, 1], [14, 3]]], np.float32)
    (_, _, _, _, live), (snapshot, codes, _, decoded, _) = lifecycle(CHANNEL, NUMBA, [x, x])
    assert [[[12.0, 2.0]]] == snapshot.center.tolist() == live.center.tolist()
    assert [32.0] == snapshot.scale.tolist()  # 448 / 14, the amax about the first centre, 0
    # residuals -2 -1 2 1, times 32: -64 -32 64 32
    assert [[[0xE8, 0xE0], [0x68, 0x60]]] == codes.codes.tolist()
    assert same_bits(x, decoded)


@pytest.mark.parametrize("recipe", DELAYED.values(), ids=DELAYED)
@pytest.mark.parametrize("backend", [NUMBA, ORACLE], ids=["numba", "oracle"])
def test_recompute_with_the_snapshot_equals_forward_to_the_bit_and_changes_nothing(recipe, backend):
    tensors = [tensor(step) for step in range(2)]
    steps = lifecycle(recipe, backend, tensors)
    live = steps[-1][4]
    kept = dataclasses.replace(live), {f: np.copy(getattr(live, f)) for f in ("scale", "descale", "amax_history")}
    for op, (x, step) in enumerate(zip(tensors, steps, strict=True)):
        snapshot, codes, _, decoded, _ = step
        again = quantize_with_snapshot(x, snapshot, backend=backend)
        assert same_bits(codes.codes, again.codes)
        assert again.snapshot is snapshot
        assert same_bits(decoded, decode_for_consumer(again, op=OpId(op), backend=backend))
        assert same_bits(tensor(op), x)
    assert kept[0] == live
    assert all(same_bits(array, getattr(live, f)) for f, array in kept[1].items())


def test_a_commit_leaves_the_state_and_the_snapshot_before_it_as_they_were():
    (snapshot, _, _, _, first), (_, _, _, _, second) = lifecycle(CHANNEL, NUMBA, [tensor(0), tensor(1)])
    assert (1, 2) == (first.epoch, second.epoch)
    assert (0, OWNER, OpId(0)) == (snapshot.epoch, snapshot.owner, snapshot.op)
    assert not same_bits(first.scale, second.scale)
    assert not same_bits(first.center, second.center)
    assert same_bits(np.ones(2, np.float32), snapshot.scale)
    assert same_bits(np.zeros((2, 1, 1), np.float32), snapshot.center)


# ---- frozen-ness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("lead", [(), (2,)], ids=["single", "replicas"])
def test_nothing_that_an_operation_returns_can_be_written(recipe, lead):
    x, op = tensor(0)[0] if lead == () else tensor(0), OpId(0)
    live = recipe.initial(OWNER, lead)
    early = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=NUMBA, op=op, lead=len(lead))
    current = isinstance(recipe, CurrentScaling)
    snapshot = begin_logical_quantization(live, op=op, recipe=recipe, observation=early if current else None)
    codes = quantize_with_snapshot(x, snapshot, backend=NUMBA)
    after = commit_quant_observation(live, early, recipe=recipe)
    merged = merge_observations([early, dataclasses.replace(early, op=OpId(0, 1))])
    values = [live, early, snapshot, codes, codes.counts, after, merged]
    values += [o.mean for o in (early, merged) if o.mean is not None]
    for value in values:
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, held)
            if isinstance(held, np.generic):
                raise AssertionError(f"{type(value).__name__}.{field.name} is a scalar, not an array")
            if isinstance(held, np.ndarray):
                assert not held.flags.writeable, f"{type(value).__name__}.{field.name}"
                with pytest.raises(ValueError, match="read-only"):
                    held[...] = 0


# ---- guards ---------------------------------------------------------------------------------------------


def begun(live, op, recipe=PLAIN):
    return begin_logical_quantization(live, op=op, recipe=recipe)


def observation(op, amax=1.0):
    zero = np.zeros(1, np.int64)
    return QuantObservation(
        op=op, amax=np.full(1, amax, np.float32), mean=None, count=zero + 4, nan_count=zero, inf_count=zero
    )


def committed(op, owner=OWNER):
    return commit_quant_observation(PLAIN.initial(owner, (1,)), observation(op), recipe=PLAIN)


LAST = OpId(3, 1)
FRESH = PLAIN.initial(OWNER, (1,))
AFTER = committed(LAST)
FOREIGN = [
    LAST._replace(layer_id=1),
    LAST._replace(site=int(Site.FFN_UP)),
    LAST._replace(role_id=int(TensorRole.WEIGHT)),
]


@pytest.mark.parametrize(
    ("act", "what", "step", "epoch"),
    [
        *[(lambda op=op: begun(FRESH, op), "begin on another owner's state", 3, 0) for op in FOREIGN],
        *[
            (lambda op=op: commit_quant_observation(FRESH, observation(op), recipe=PLAIN), "another owner's", 3, 0)
            for op in FOREIGN
        ],
        (lambda: begun(committed(OpId(0, worker_id=1), OWNER._replace(worker_id=1)), OpId(1)), "another owner's", 1, 1),
        (lambda: begun(AFTER, LAST), "begin after commit", 3, 1),
        (lambda: begun(AFTER, OpId(3, 0)), "begin after commit", 3, 1),
        (lambda: begun(AFTER, OpId(2, 7)), "begin after commit", 2, 1),
        (lambda: commit_quant_observation(AFTER, observation(LAST), recipe=PLAIN), "second commit", 3, 1),
        (lambda: commit_quant_observation(AFTER, observation(OpId(3, 0)), recipe=PLAIN), "second commit", 3, 1),
        (lambda: commit_quant_observation(AFTER, observation(OpId(2, 5)), recipe=PLAIN), "second commit", 2, 1),
    ],
)
def test_a_breach_is_refused_with_owner_step_and_epoch(act, what, step, epoch):
    with pytest.raises(ProtocolViolation, match=what) as refused:
        act()
    message = str(refused.value)
    assert "owner L0/qkv/input" in message
    assert f"step {step} " in message
    assert f"epoch {epoch};" in message
    assert refused.value.exit_code == 1


@pytest.mark.parametrize("op", [OpId(3, 2), OpId(4, 0)])
def test_the_next_microbatch_and_the_next_step_are_let_in(op):
    assert begun(AFTER, op).epoch == 1
    assert commit_quant_observation(AFTER, observation(op), recipe=PLAIN).epoch == 2


def test_a_shared_owner_lets_its_other_layers_in():
    live = committed(LAST, StateKey(ANY, OWNER.site, OWNER.role_id))
    assert begun(live, LAST._replace(layer_id=1)).epoch == 1
    with pytest.raises(ProtocolViolation, match=r"owner L\*/qkv/input"):
        begun(live, LAST)


def test_current_scaling_needs_the_observation_of_this_op_and_delayed_takes_none():
    current = EVERY["current"]
    live = current.initial(OWNER, (1,))
    with pytest.raises(UsageError, match="recipe current needs the observation"):
        begin_logical_quantization(live, op=OpId(0), recipe=current)
    with pytest.raises(UsageError, match="recipe delayed takes no observation"):
        begin_logical_quantization(FRESH, op=OpId(0), recipe=PLAIN, observation=observation(OpId(0)))
    with pytest.raises(ProtocolViolation, match=r"begin with the observation of step 1 .*step 2 .*epoch 0"):
        begin_logical_quantization(live, op=OpId(2), recipe=current, observation=observation(OpId(1)))
    with pytest.raises(UsageError, match="needs op="):
        observe_for_future_state(tensor(0), snapshot=None, recipe=current, backend=NUMBA)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (tensor(0).astype(np.float64), r"is float64\[2, 5, 6\]; expected float32 with leading axes \[2\]"),
        (tensor(0, 3), r"is float32\[3, 5, 6\]; expected float32 with leading axes \[2\]"),
        (np.float32(1).reshape(()), r"is float32\[\]"),
        (tensor(0)[:, 0], r"centre \[2, 1, 6\] .* does not fit tensor \[2, 6\] .*rest_ndim=1"),
        (tensor(0, shape=(5, 7)), r"centre \[2, 1, 6\] of owner L0/qkv/input does not fit tensor \[2, 5, 7\]"),
    ],
    ids=["dtype", "replicas", "no axis", "axes", "channels"],
)
def test_a_tensor_that_does_not_fit_its_snapshot_is_refused(x, message):
    live = lifecycle(CHANNEL, NUMBA, [tensor(0)])[0][4]
    snapshot = begun(live, OpId(1), CHANNEL)
    with pytest.raises(UsageError, match=message):
        quantize_with_snapshot(x, snapshot, backend=NUMBA)
    with pytest.raises(UsageError, match=message):
        observe_for_future_state(x, snapshot=snapshot, recipe=CHANNEL, backend=NUMBA)


def test_current_scaling_refuses_another_dtype_when_it_observes():
    with pytest.raises(FormatError, match="float64"):
        observe_for_future_state(
            tensor(0).astype(np.float64), snapshot=None, recipe=EVERY["current"], backend=NUMBA, op=OpId(0), lead=1
        )


@pytest.mark.parametrize("field", OpId._fields)
def test_a_consumer_refuses_codes_of_another_operation(field):
    codes = lifecycle(PLAIN, NUMBA, [tensor(0)])[0][1]
    consumer = OpId(0)._replace(**{field: 1})
    if field == "visit":  # a recompute is the same operation, entered again
        assert decode_for_consumer(codes, op=consumer, backend=NUMBA).shape == (2, 5, 6)
        return
    with pytest.raises(ProtocolViolation, match=r"given codes of step 0 .*owner L0/qkv/input, step .*, epoch 0;"):
        decode_for_consumer(codes, op=consumer, backend=NUMBA)


def test_a_plain_cast_has_nothing_to_decode_with():
    codes = dataclasses.replace(lifecycle(PLAIN, NUMBA, [tensor(0)])[0][1], snapshot=None)
    with pytest.raises(UsageError, match="a plain cast has no snapshot"):
        decode_for_consumer(codes, op=OpId(0), backend=NUMBA)


def test_a_message_can_name_a_site_and_a_role_that_qsim_does_not_know():
    op = OpId(1, site=99, role_id=77)
    with pytest.raises(ProtocolViolation, match=r"owner L0/qkv/input, step 1 .* Site99\.TensorRole77 "):
        begun(FRESH, op)
    assert str(StateKey(2, 99, 77, 1)) == "L2/site99/tensorrole77/w1"
