"""Many tensors of one replica axis in one buffer [R, n]. Knows no optimizer.

A decoder has some fifty tensors, most of them small: one pass over a buffer replaces fifty, and a sum over equally long
tensors is one sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from qsim.arrays import F32, frozen
from qsim.errors import UsageError


class Run(NamedTuple):
    """``names`` lie one after another from column ``start``, each ``length`` columns long."""

    start: int
    length: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies: vectors first, then matrices from column ``matrices``, each kind by length.

    shapes: of the tensors, without the replica axis, in the order of the mapping that they came in.
    """

    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    runs: tuple[Run, ...]
    matrices: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat(Mapping[str, F32]):
    """A mapping of names to views [R, ...] of ``buffer`` [R, n]; read-only where the buffer is."""

    buffer: F32
    layout: Layout

    def __getitem__(self, name: str) -> F32:
        start, shape = self.layout.starts[name], self.layout.shapes[name]
        return self.buffer[:, start : start + math.prod(shape)].reshape(-1, *shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)


def layout_of(tensors: Mapping[str, F32]) -> Layout:
    """The layout of these tensors [R, ...]; UsageError where there is none, or where their replicas differ."""
    if isinstance(tensors, Flat):
        return tensors.layout
    replicas = {len(x) for x in tensors.values()}
    if len(replicas) != 1:
        raise UsageError(f"tensors of {sorted(replicas)} replicas; give one or more, all of one number of replicas")
    return _layout(tuple((name, tuple(x.shape[1:])) for name, x in tensors.items()))


@functools.lru_cache(maxsize=16)
def _layout(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Layout:
    def key(item: tuple[str, tuple[int, ...]]) -> tuple[bool, int]:
        return len(item[1]) > 1, math.prod(item[1])

    starts: dict[str, int] = {}
    runs: list[Run] = []
    at, matrices = 0, -1
    for item in sorted(shapes, key=key):
        is_matrix, length = key(item)
        if is_matrix and matrices < 0:
            matrices = at
        name = item[0]
        starts[name] = at
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(names=(*runs[-1].names, name))
        else:
            runs.append(Run(at, length, (name,)))
        at += length
    return Layout(
        shapes=dict(shapes), starts=starts, runs=tuple(runs), matrices=at if matrices < 0 else matrices, columns=at
    )


def gathered(xp: Any, tensors: Mapping[str, F32], layout: Layout, factor: F32 | None = None) -> Flat:
    """The tensors in one buffer of this layout; as they are if they lie so.

    With ``factor`` [R] multiplied by it on the way, in a buffer that is the caller's own. UsageError: other
    names, shapes or dtypes than the layout and the first tensor have.
    """
    if isinstance(tensors, Flat) and tensors.layout is layout:
        return tensors if factor is None else Flat(buffer=tensors.buffer * factor[:, None], layout=layout)
    check_tensors(tensors, layout)
    first = next(iter(tensors.values()))
    replicas = len(first)
    buffer = xp.empty((replicas, layout.columns), first.dtype)
    for name, x in tensors.items():
        shape, start = layout.shapes[name], layout.starts[name]
        place = buffer[:, start : start + math.prod(shape)]
        if factor is None:
            place[...] = x.reshape(replicas, -1)
        else:
            xp.multiply(x.reshape(replicas, -1), factor[:, None], out=place)
    return Flat(buffer=buffer if factor is not None else frozen(buffer), layout=layout)


def check_tensors(tensors: Mapping[str, F32], layout: Layout) -> None:
    """UsageError: other names, shapes or dtypes than the layout and the first tensor have."""
    if tensors.keys() != layout.shapes.keys():
        raise UsageError(f"tensors {sorted(tensors.keys() ^ layout.shapes.keys())} are on one side only")
    first = next(iter(tensors.values()))
    replicas, dtype = len(first), first.dtype
    for name, x in tensors.items():
        if x.shape != (replicas, *layout.shapes[name]) or x.dtype != dtype:
            shape = (replicas, *layout.shapes[name])
            raise UsageError(f"{name} is {x.dtype} {tuple(x.shape)}; it should be {dtype} {shape}")
