"""Shrinking: never larger, still broken by ``check``, within its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qsim.explore.shrink  # noqa: F401  the package exports the function by this name
from qsim.explore import Choices, Codes, Commits, Kind, Space, Token, followed, replayed, shrink, token_of
from qsim.explore.preempted import Bounded, Least
from qsim.explore.shrink import Size, size_of

module = sys.modules["qsim.explore.shrink"]

LARGE = {
    "lost commit": Space(workers=3, steps=2, layers=2, part="linear", commit=Commits.SPLIT),
    "live reads": Space(workers=3, steps=2, layers=3, part="block", preset="seed_defective"),
    "stale centre": Space(workers=2, steps=2, layers=2, defect="D07"),
    "one snapshot": Space(workers=3, layers=2, defect="D05"),
    "scratch": Space(workers=3, layers=2, codes=Codes.SCRATCH),
    "live and split": Space(workers=3, layers=2, defect="D01", commit=Commits.SPLIT),
    "unit step": Space(workers=3, steps=2, scope="layer"),
}
RULES_OF = {
    "lost commit": ("I3",), "live reads": ("I1", "I2", "I3", "I5"), "stale centre": ("I1", "I7"),
    "one snapshot": ("I1", "I2", "I4"), "scratch": ("I1", "I4"), "unit step": ("I3",),
    "live and split": ("I1", "I3"),
}  # fmt: skip


class Ticking:
    """A clock that goes a second ahead whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def run_of(space: Space, words: list[int]) -> Choices:
    return followed(space, tuple(word % space.workers for word in words))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_was_shrunk_is_never_larger_and_still_breaks_the_rule(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(LARGE)))
    rule = data.draw(st.sampled_from(RULES_OF[name]))
    run = run_of(LARGE[name], data.draw(st.lists(st.integers(0, 5), min_size=30, max_size=60)))
    token = Token(space=LARGE[name], choices=run, invariant=rule)
    small = shrink(token, clock=time.perf_counter, seconds=0.3)
    assert rule == small.invariant
    if not replayed(token).found:
        assert token == small
        return
    assert rule in {violation.invariant for violation in replayed(small).violations}
    assert size_of(small) <= size_of(token)
    assert small == token_of(small.text())


def shrunk_by_hand() -> Iterator[tuple[str, str, Size]]:
    """The least that there can be, by hand: who must do what before the rule can break."""
    yield "lost commit", "I3", Size(1, 1, 2, 1, 20)  # 5 of worker 0, 14 of worker 1 (all it has), the write of worker 0
    yield "live reads", "I1", Size(1, 1, 1, 0, 8)  # load P Q O C load F U
    yield "live reads", "I2", Size(1, 1, 1, 0, 12)  # and drop load P Q
    yield "stale centre", "I7", Size(1, 1, 1, 0, 8)
    yield "live and split", "I3", Size(1, 1, 2, 1, 22)  # as the lost commit, with two live reads of worker 1
    yield "scratch", "I4", Size(1, 1, 2, 1, 20)  # 6 of worker 0 up to its read, all 13 of worker 1, the read


@pytest.mark.parametrize(("name", "rule", "size"), list(shrunk_by_hand()))
def test_a_long_run_in_a_large_space_is_shrunk_to_the_least_that_there_is(name: str, rule: str, size: Size) -> None:
    run = run_of(LARGE[name], [2, 0, 1, 0, 1, 2, 1] * 20)
    token = Token(space=LARGE[name], choices=run, invariant=rule)
    assert replayed(token).found
    assert size == size_of(shrink(token, clock=time.perf_counter, seconds=20.0))


def test_a_setting_that_the_violation_does_not_need_is_made_plain() -> None:
    token = Token(space=Space(defect="D01", commit=Commits.SPLIT, part="block"), choices=(0,) * 12, invariant="I1")
    small = shrink(token, clock=time.perf_counter)
    assert ("input", Commits.ATOMIC, "D01") == (small.space.part, small.space.commit, small.space.defect)


def test_when_the_time_is_over_nothing_more_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts at 1 and goes ahead with every question, so the end is at 6 and few looks are left."""
    clock, looks, tries = Ticking(), list[float](), list[float]()
    bounded, compiled, offer = module.preemption_bounded, module.compiled, module._Best.offer

    def looked(*args: Any, **options: Any) -> Any:
        looks.append(clock())  # a look takes a second too
        return bounded(*args, **options)

    def compiles(space: Space) -> Any:
        looks.append(clock.now)
        return compiled(space)

    def tried(*args: Any, **options: Any) -> Any:
        tries.append(clock.now)
        return offer(*args, **options)

    monkeypatch.setattr(module, "preemption_bounded", looked)
    monkeypatch.setattr(module, "compiled", compiles)
    monkeypatch.setattr(module._Best, "offer", tried)
    token = Token(
        space=LARGE["lost commit"], choices=run_of(LARGE["lost commit"], [2, 0, 1, 0, 1, 2, 1] * 20), invariant="I3"
    )
    assert replayed(shrink(token, clock=clock, seconds=5.0)).found
    assert looks
    assert max(looks) < 6.0 + 1.0
    assert max(tries) < 6.0 + 1.0


def test_a_worse_run_than_the_one_at_hand_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is cut short by its budget may come back with a run that preempts more."""
    space = Space(commit=Commits.SPLIT)
    good = Token(space=space, choices=(0, 0, 1, 1, 1, 0), invariant="I3")
    worse = Least(16, 3, (0, 1, 0, 1, 0, 1))
    monkeypatch.setattr(module, "preemption_bounded", lambda *_, **__: Bounded(1, False, {Kind.LOST_COMMIT: worse}))
    assert replayed(Token(space=space, choices=worse.choices, invariant="I3")).found
    assert good == shrink(good, clock=time.perf_counter)


def test_without_any_time_the_run_is_still_cut_at_its_violation() -> None:
    longer = Token(space=Space(commit=Commits.SPLIT), choices=(0, 0, 1, 1, 0, 1), invariant="I3")
    assert longer.choices == shrink(longer, clock=Ticking(), seconds=0.0).choices
    wide = Token(space=Space(workers=3, commit=Commits.SPLIT), choices=(0, 0, 1, 1, 0, 1, 2, 2, 2), invariant="I3")
    assert (0, 0, 1, 1, 0, 1) == shrink(wide, clock=Ticking(), seconds=0.0).choices


def test_a_run_that_keeps_its_rule_is_left_as_it_is() -> None:
    kept = Token(space=Space(workers=3), choices=(0, 1, 2), invariant="I3")
    assert kept == shrink(kept, clock=time.perf_counter)
