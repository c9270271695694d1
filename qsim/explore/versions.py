"""What a slot holds while a thread is lowered: a version that is known, or one that was read. Lowers nothing."""

from __future__ import annotations

from typing import NamedTuple

from qsim.explore.names import NOTHING, Seen
from qsim.quant import OpId, StateKey


class Known(NamedTuple):
    """A version of a cell that no other worker writes."""

    cell: StateKey
    epoch: int


class Read(NamedTuple):
    """What was read from a shared field at an event: a version, or an op. cell: None where it depends on the order."""

    cell: StateKey | None
    field: int
    piece: int
    event: int


Version = Known | Read


class Content(NamedTuple):
    """What a slot holds. by: the op that filled it, or the field that says which. frozen: the op that the version was
    frozen for, None for no one. seen: of an observation.
    """

    by: OpId | int
    version: Version | None
    frozen: OpId | Read | None = None
    seen: Seen = NOTHING
