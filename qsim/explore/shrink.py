"""Makes a violation small: fewer steps, layers, workers, preemptions, events; then plainer settings.

In this order: a step less counts for more than any number of events. A token is kept only where ``check`` still finds
its invariant broken, and its size is never above the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from qsim.errors import QsimError
from qsim.explore.compiling import compiled
from qsim.explore.counterexample import cut, replayed
from qsim.explore.preempted import Least, preemption_bounded
from qsim.explore.runs import Choices, can_run, completed, preemptions
from qsim.explore.space import PARTS, Codes, Commits, Space
from qsim.explore.token import Token

SECONDS = 5.0
BUDGET = 10_000
"""States that one look at a smaller space may visit: a tenth of a second or so, so that the time is kept."""

PREEMPTIONS = 4
"""Looks with at most 0, 1 ... preemptions, before one without a bound."""


class Size(NamedTuple):
    """What is counted, first things first: a smaller space may need a longer run."""

    steps: int
    layers: int
    workers: int
    preemptions: int
    events: int


def size_of(token: Token) -> Size:
    """The size of a violation: of its space, and of its run up to and with the event that breaks the invariant."""
    space, found = token.space, replayed(token).found
    assert found, "the run breaks its invariant"
    run = cut(space, completed(space, token.choices), found[0].event)
    return Size(space.steps, space.layers, space.workers, preemptions(space, run), found[0].event + 1)


def shrink(token: Token, *, clock: Callable[[], float], seconds: float = SECONDS) -> Token:
    """A token of the same invariant that is smaller, or as small; the token itself where its run keeps it.

    clock: seconds from any origin. After ``seconds`` no further space is looked at, and what was found so far counts.
    """
    end = clock() + seconds
    again = replayed(token)
    if not again.found:
        return token
    token = replace(token, choices=cut(token.space, again.run, again.found[0].event))
    best = _Best(token, size_of(token))
    changed = True
    while changed:
        changed = any(best.offer_space(smaller, clock, end) for smaller in _smaller(best.token.space))
    best.offer_space(best.token.space, clock, end)
    best.shorten(clock, end)
    for plainer in _plainer(best.token.space):
        best.offer_space(_merged(best.token.space, plainer), clock, end, plainer=True)
    return best.token


@dataclass(slots=True)
class _Best:
    """The smallest token so far."""

    token: Token
    size: Size

    def offer(self, space: Space, choices: Choices, *, plainer: bool = False) -> bool:
        """Keep this run where it is smaller; ``plainer``: also where it is as small."""
        again = replayed(Token(space=space, choices=choices, invariant=self.token.invariant))
        if not again.found:
            return False
        token = replace(again.token, choices=cut(space, again.run, again.found[0].event))
        size = size_of(token)
        if size > self.size or (size == self.size and not plainer):
            return False
        self.token, self.size = token, size
        return True

    def offer_space(
        self, space: Space, clock: Callable[[], float], end: float, *, plainer: bool = False
    ) -> bool:  # fmt: skip
        """Keep the least run of another space, where that is smaller and there is time to look."""
        if clock() >= end:
            return False
        try:
            found = self._least(space, clock, end)
            return found is not None and self.offer(space, found.choices, plainer=plainer)
        except QsimError:  # too small to host the defect, or events that cannot be followed
            return False

    def _least(self, space: Space, clock: Callable[[], float], end: float) -> Least | None:
        program = compiled(space)
        wanted = [kind for kind in program.kinds if kind.invariant == self.token.invariant]
        for most in (*range(PREEMPTIONS), None):
            if not wanted or clock() >= end:
                return None
            found = preemption_bounded(program, most=most, wanted=wanted, budget=BUDGET).least
            if found:
                return min(found.values(), key=lambda run: (run.preemptions, run.events))
        return None

    def shorten(self, clock: Callable[[], float], end: float) -> None:
        """Leave out a worker's turns, or join two of them, while that makes the run smaller."""
        again = True
        while again:
            again = False
            for choices in _shorter(self.token.choices):
                if clock() >= end:
                    return
                if can_run(self.token.space, choices) and self.offer(self.token.space, choices):
                    again = True
                    break


def _smaller(space: Space) -> Iterator[Space]:
    """Spaces with less of one thing, least first."""
    for count in range(1, space.steps):
        yield replace(space, steps=count)
    for count in range(1, space.layers):
        yield replace(space, layers=count)
    for count in range(1, space.workers):
        yield replace(space, workers=count)


def _plainer(space: Space) -> Iterator[dict[str, object]]:
    """Settings that are simpler than those of ``space``: the violation may not need them."""
    for part in itertools.takewhile(lambda name: name != space.part, PARTS):
        yield {"part": part}
    if space.codes is not Codes.OWN:
        yield {"codes": Codes.OWN}
    if space.commit is not Commits.ATOMIC:
        yield {"commit": Commits.ATOMIC}
    if space.recipe == "centred":
        yield {"recipe": "delayed"}


def _merged(space: Space, settings: dict[str, object]) -> Space:
    """The space with other settings; one that was made plainer before stays so."""
    part = settings.get("part")
    if isinstance(part, str) and list(PARTS).index(part) >= list(PARTS).index(space.part):
        return space
    return replace(space, **settings)  # type: ignore[arg-type]


def _shorter(choices: Choices) -> Iterator[Choices]:
    """Runs with a turn less, or with a turn moved back to the one before of the same worker."""
    turns = [(worker, len(list(group))) for worker, group in itertools.groupby(choices)]
    for at in range(len(turns)):
        yield _joined([*turns[:at], *turns[at + 1 :]])
    for at, turn in enumerate(turns):
        before = [earlier for earlier in range(at) if turns[earlier][0] == turn[0]]
        if before:
            rest = [*turns[:at], *turns[at + 1 :]]
            rest.insert(before[-1] + 1, turn)
            yield _joined(rest)


def _joined(turns: list[tuple[int, int]]) -> Choices:
    return tuple(worker for worker, count in turns for _ in range(count))
