"""What each event reads and writes that somebody else could see: cells and slots. The one table; knows no engine."""

from __future__ import annotations

from typing import NamedTuple

from qsim.quant import OpId, StateKey
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    Load,
    Observe,
    Quantize,
    Slot,
    Store,
)


class Footprint(NamedTuple):
    """op: whose event it is, None for a drop. cell: the state touched. takes, puts: slots read and written."""

    op: OpId | None
    cell: StateKey | None = None
    writes_cell: bool = False
    takes: tuple[Slot, ...] = ()
    puts: tuple[Slot, ...] = ()


def footprint(event: Event) -> Footprint:
    """The footprint of ``event``: a line for each kind of event."""
    match event:
        case Load(_, op, out):
            return Footprint(op, puts=(out,))
        case Begin(_, op, cell, into, obs):
            return Footprint(op, cell, takes=_named(obs), puts=(into,))
        case Quantize(_, op, src, by, out):
            return Footprint(op, takes=(src, by), puts=(out,))
        case Observe(_, op, src, by, into):
            return Footprint(op, takes=(src, *_named(by)), puts=(into,))
        case Commit(_, op, cell, obs):
            return Footprint(op, cell, writes_cell=True, takes=obs)
        case Fetch(_, op, cell, into):
            return Footprint(op, cell, puts=(into,))
        case Store(_, op, cell, base, obs):
            return Footprint(op, cell, writes_cell=True, takes=(base, *obs))
        case Consume(_, op, _, operands, out):
            takes = (name for o in operands for name in _named(o.codes, o.descale, o.center, o.version))
            return Footprint(op, takes=tuple(dict.fromkeys(takes)), puts=(out,))
        case Drop(_, gone):
            return Footprint(None, puts=gone)  # to free a slot is to write it


def _named(*names: Slot | None) -> tuple[Slot, ...]:
    return tuple(name for name in names if name is not None)
