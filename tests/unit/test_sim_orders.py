"""Orders of passes, against what pipelines do tick by tick, worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from qsim.errors import UsageError
from qsim.sim.schedule import Kind, Order, Pass, ScheduleSpec, parts_of, passes_of

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS


def spec_of(order: Order, **sizes: int) -> ScheduleSpec:
    return ScheduleSpec(steps=1, order=order, **sizes)


def ticks(*rows: str) -> list[Pass]:
    """Each word is a pass: kind, batch, part ("F01": forward of batch 0 on part 1)."""
    kinds = {"F": F, "B": B, "W": W}
    return [Pass(kinds[word[0]], int(word[1]), int(word[2])) for row in rows for word in row.split()]


HAND = {
    # stage 0 warms up with one forward; stage 1 alternates at once; a stage waits where its neighbour is not done
    Order.ONE_F_ONE_B: (
        {"microbatches": 3, "layers": 2},
        ticks("F00", "F10 F01", "B01", "B00 F11", "F20 B11", "B10 F21", "B21", "B20"),
    ),
    # stage 0 does each W right after its B, stage 1 puts it off by one backward
    Order.ZERO_BUBBLE: (
        {"microbatches": 2, "layers": 2},
        ticks("F00", "F10 F01", "B01", "B00 F11", "W00 B11", "B10 W01", "W10 W11"),
    ),
    # two stages of two chunks: stage 0 holds parts 0 and 2 and warms up with four forwards, stage 1 parts 1 and 3
    Order.INTERLEAVED: (
        {"microbatches": 2, "layers": 4},
        ticks(
            "F00", "F10 F01", "F02 F11", "F12 F03", "B03", "B02 F13", "B13", "B12 B01", "B00 B11", "B10",
        ),
    ),
    Order.FORWARD_FIRST: ({"microbatches": 2, "layers": 2}, ticks("F00 F10 B10 B00")),
    Order.ALTERNATE: ({"microbatches": 2, "layers": 2}, ticks("F00 B00 F10 B10")),
}  # fmt: skip


@pytest.mark.parametrize("order", Order)
def test_passes_follow_each_other_as_worked_out_by_hand(order: Order) -> None:
    sizes, expected = HAND[order]
    assert expected == list(passes_of(spec_of(order, **sizes)))


@pytest.mark.parametrize("order", [Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.ZERO_BUBBLE])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (2, 6), (3, 3), (4, 8)])
def test_a_pipeline_does_every_pass_once_and_after_what_it_needs(order: Order, stages: int, microbatches: int) -> None:
    spec = spec_of(order, microbatches=microbatches, layers=8, stages=stages)
    passes = passes_of(spec)
    at = {one: i for i, one in enumerate(passes)}
    kinds = (F, B, W) if order is Order.ZERO_BUBBLE else (F, B)
    due = {Pass(k, b, p) for k, b, p in itertools.product(kinds, range(microbatches), range(spec.chunks))}
    assert due == set(passes)
    assert len(due) == len(passes)
    for b, p in itertools.product(range(microbatches), range(spec.chunks)):
        assert at[Pass(F, b, p)] < at[Pass(B, b, p)]
        if p:
            assert at[Pass(F, b, p - 1)] < at[Pass(F, b, p)]
            assert at[Pass(B, b, p)] < at[Pass(B, b, p - 1)]
        if W in kinds:
            assert at[Pass(B, b, p)] < at[Pass(W, b, p)]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (4, 8)])
def test_one_forward_one_backward_holds_at_most_as_many_microbatches_as_stages_follow(stages, microbatches) -> None:
    for stage in range(stages):
        held = most = 0
        for one in passes_of(spec_of(Order.ONE_F_ONE_B, microbatches=microbatches, layers=8, stages=stages)):
            held += {F: 1, B: -1}[one.kind] * (one.part == stage)
            most = max(most, held)
        assert stages - stage == most


def test_layers_are_split_evenly_in_order() -> None:
    parts = parts_of(spec_of(Order.ONE_F_ONE_B, layers=7, stages=3, microbatches=1))
    assert [[0, 1], [2, 3], [4, 5, 6]] == [list(part) for part in parts]


@pytest.mark.parametrize(
    ("order", "sizes", "message"),
    [
        (Order.ONE_F_ONE_B, {"layers": 1}, "1f1b splits 1 layer.* over 2 parts"),
        (Order.INTERLEAVED, {"layers": 3, "microbatches": 2}, "interleaved splits 3 layer.* over 4 parts"),
        (Order.INTERLEAVED, {"layers": 4, "microbatches": 3}, "3 microbatches a worker in groups of schedule.stages 2"),
    ],
)
def test_a_pipeline_that_cannot_be_split_is_refused(order: Order, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(order, **sizes)
