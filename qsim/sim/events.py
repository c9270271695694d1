"""What can happen in a schedule: one NamedTuple an event, plain names and ids. Knows no tensor and no verdict."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from qsim.quant import OpId, StateKey


class Phase(StrEnum):
    """When an event happens: forward, recompute, backward, update."""

    FORWARD = "f"
    RECOMPUTE = "r"
    BACKWARD = "b"
    UPDATE = "u"


METADATA_FIELDS = ("descale", "center", "version")

Slot = str
"""Name of a place for a value. Slots are reused from step to step, so memory stays bounded and visible."""


class Load(NamedTuple):
    """Bring the tensor of ``key`` in: the same tensor however often it is loaded."""

    phase: Phase
    key: OpId
    out: Slot


class Begin(NamedTuple):
    """Freeze the state of ``cell`` for ``op``. obs: the observation that current scaling needs, else None."""

    phase: Phase
    op: OpId
    cell: StateKey
    into: Slot
    obs: Slot | None = None


class Quantize(NamedTuple):
    """Encode ``src`` with the metadata in ``by``."""

    phase: Phase
    op: OpId
    src: Slot
    by: Slot
    out: Slot


class Observe(NamedTuple):
    """Look at ``src`` for a future state. by: the metadata in force (its centre), None before a begin."""

    phase: Phase
    op: OpId
    src: Slot
    by: Slot | None
    into: Slot


class Commit(NamedTuple):
    """Advance ``cell`` by the merged observations ``obs``, in one atomic step."""

    phase: Phase
    op: OpId
    cell: StateKey
    obs: tuple[Slot, ...]


class Fetch(NamedTuple):
    """Read the live state of ``cell`` as it is now."""

    phase: Phase
    op: OpId
    cell: StateKey
    into: Slot


class Store(NamedTuple):
    """Write to ``cell`` the successor of the state fetched into ``base``: half of a torn commit."""

    phase: Phase
    op: OpId
    cell: StateKey
    base: Slot
    obs: tuple[Slot, ...]


class Operand(NamedTuple):
    """What a consumer decodes: ``codes``, with metadata that it names itself.

    of: the quantize that it means to decode. descale, center, version: the slots (snapshots or fetched
    states) that each is read from; all None for a tensor that was never cast, center None without a centre.
    """

    of: OpId
    codes: Slot
    descale: Slot | None
    center: Slot | None
    version: Slot | None

    def renamed(self, rename: Callable[[Slot], Slot], fields: tuple[str, ...] = METADATA_FIELDS) -> Operand:
        """The operand with the named metadata slots renamed; a slot that is None stays None."""

        def new(field: str, name: Slot | None) -> Slot | None:
            return rename(name) if name is not None and field in fields else name

        return self._replace(
            descale=new("descale", self.descale),
            center=new("center", self.center),
            version=new("version", self.version),
        )


class Consume(NamedTuple):
    """A GEMM: decode both operands by name, multiply. gemm: "linear", "scores", "dgrad" or "wgrad"."""

    phase: Phase
    op: OpId
    gemm: str
    operands: tuple[Operand, Operand]
    out: Slot


class Drop(NamedTuple):
    """Free slots."""

    phase: Phase
    slots: tuple[Slot, ...]


Event = Load | Begin | Quantize | Observe | Commit | Fetch | Store | Consume | Drop
Schedule = tuple[Event, ...]
