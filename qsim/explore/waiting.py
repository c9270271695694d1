"""Who can go on: a worker whose next piece needs pieces of others waits until they are done. Knows no event."""

from __future__ import annotations

from collections.abc import Sequence

Needs = tuple[tuple[int, int], ...]
"""Pairs of a worker and the number of pieces that it must have done."""


def ready(needs: Sequence[Sequence[Needs]], place: Sequence[int]) -> list[int]:
    """Workers that have not ended and wait for nobody. needs: by worker and piece; place: pieces done, by worker."""
    return [
        worker
        for worker, (mine, done) in enumerate(zip(needs, place, strict=True))
        if done < len(mine) and all(place[other] >= count for other, count in mine[done])
    ]
