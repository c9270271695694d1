"""One line of what happened: the record that the simulator and a recorder of a real trainer both write.

Holds identities and versions, never tensors. Knows no invariant.
"""

from __future__ import annotations

from typing import NamedTuple

Op = tuple[int, int, int, int, int, int, int]
"""logical_step, microbatch, layer_id, site, role_id, worker_id, visit."""


class Version(NamedTuple):
    """Which state a piece of metadata came from: its owner, the epoch, and the op it was frozen for."""

    owner: str
    epoch: int
    op: Op | None


class Seen(NamedTuple):
    """One observation that a commit folded in: the op observed, and the phase in which it was observed."""

    op: Op
    phase: str


class OperandRecord(NamedTuple):
    """One operand of a consumer.

    of: the quantize that the consumer means to decode; codes_op and codes: which quantize really made the
    bits, and under which version; descale, center, version: where each piece of metadata came from. All of
    them None for an operand that was never cast (codes_op then None too).
    """

    of: Op
    codes_op: Op | None
    codes: Version | None
    descale: Version | None
    center: Version | None
    version: Version | None


class Record(NamedTuple):
    """One event. ``kind``: begin, quantize, observe, commit, fetch, store, consume, load, drop.

    owner: the cell that the event touched ("" where none). epoch_before and epoch_after: of that cell.
    used: the version that a quantize encoded with, that a begin or fetch took, or that a store is based on.
    seen: the observations that a commit or store folded in.
    """

    seq: int
    kind: str
    phase: str
    op: Op | None
    owner: str = ""
    epoch_before: int = -1
    epoch_after: int = -1
    used: Version | None = None
    seen: tuple[Seen, ...] = ()
    operands: tuple[OperandRecord, ...] = ()
    gemm: str = ""
