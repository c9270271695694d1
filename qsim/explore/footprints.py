"""What each event reads and writes that somebody else could see. The one table; knows no engine.

Cells and slots have fields of their own. Every other place is a name: a queue, the mailbox of a reduction, the version
of the weights.
"""

from __future__ import annotations

from typing import NamedTuple

from qsim.quant import OpId, StateKey, TensorRole
from qsim.sim.events import (
    Allocate,
    Begin,
    Commit,
    Compute,
    Consume,
    Drop,
    Event,
    Fetch,
    Load,
    LoadState,
    Observe,
    Optimize,
    Quantize,
    Reduce,
    Restart,
    Restore,
    SaveState,
    Slot,
    Stash,
    Store,
    Wait,
)

Place = str
WEIGHTS: Place = "weights"
PROCESS: Place = "process"
"""Everything at once: what a save reads, and a restart or a load of a checkpoint writes."""


class Footprint(NamedTuple):
    """op: whose event it is, None for what belongs to no operation. cell: the state touched. takes, puts: slots read
    and written. place: what else is touched; two events that only read it commute.
    """

    op: OpId | None
    cell: StateKey | None = None
    writes_cell: bool = False
    takes: tuple[Slot, ...] = ()
    puts: tuple[Slot, ...] = ()
    place: Place = ""
    writes_place: bool = False


def footprint(event: Event) -> Footprint:
    """The footprint of ``event``: a line for each kind of event."""
    match event:
        case Load(_, op, out):
            return Footprint(op, puts=(out,), place=WEIGHTS if op.role_id == TensorRole.WEIGHT else "")
        case Compute(_, at, _, ins, outs):
            return Footprint(at, takes=ins, puts=outs)
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
            cached = any(o.cached for o in operands)
            return Footprint(op, takes=tuple(dict.fromkeys(takes)), puts=(out,), place=WEIGHTS if cached else "")
        case Stash(_, op, queue, name):
            return Footprint(op, takes=(name,), place=queue, writes_place=True)
        case Restore(_, op, queue, into, _, cell):  # the cell is read where the queue is empty
            return Footprint(op, cell, puts=(into,), place=queue, writes_place=True)
        case Reduce(_, op, group, obs):
            return Footprint(op, takes=(obs,), place=mailbox(group.name), writes_place=True)
        case Wait(_, op, group, into):  # it waits until all are there, so what it reads depends on no other wait
            return Footprint(op, puts=(into,), place=mailbox(group.name))
        case Optimize(_, op):
            return Footprint(op, place=WEIGHTS, writes_place=True)
        case SaveState(_, _, into):
            return Footprint(None, puts=(into,), place=PROCESS)
        case Restart(_, keep):
            return Footprint(None, takes=keep, place=PROCESS, writes_place=True)
        case LoadState(_, source):
            return Footprint(None, takes=(source,), place=PROCESS, writes_place=True)
        case Allocate(_, like, names):
            return Footprint(like, puts=names)
        case Drop(_, gone):
            return Footprint(None, puts=gone)  # to free a slot is to write it


def mailbox(group: str) -> Place:
    """The place where the ranks of a group meet."""
    return f"mail/{group}"


def _named(*names: Slot | None) -> tuple[Slot, ...]:
    return tuple(name for name in names if name is not None)
