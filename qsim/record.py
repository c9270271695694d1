"""One line of what happened: the record that the simulator and a recorder of a real trainer both write.

Holds identities and versions, never tensors. Knows no invariant.
"""

from __future__ import annotations

from typing import NamedTuple

Op = tuple[int, int, int, int, int, int, int]
"""logical_step, microbatch, layer_id, site, role_id, worker_id, visit."""


class Version(NamedTuple):
    """Which state a piece of metadata came from: its owner, the epoch, and the op it was frozen for.

    descale: the epoch of the descale that was read with it; None where it is the same. storage: which copy of the
    owner's state; 0 is the live one.
    """

    owner: str
    epoch: int
    op: Op | None
    descale: int | None = None
    storage: int = 0


class Seen(NamedTuple):
    """One observation that a commit folded in: the op observed, in which phase, and what its tensor held.

    content: "" for numbers as usual, "empty" for a tensor without tokens, "nonfinite" where Inf or NaN was in it.
    """

    op: Op
    phase: str
    content: str = ""


class OperandRecord(NamedTuple):
    """One operand of a consumer.

    of: the quantize that the consumer means to decode; codes_op and codes: which quantize really made the
    bits, and under which version; descale, center, version: where each piece of metadata came from. All of
    them None for an operand that was never cast (codes_op then None too). cached: read from a weight cache;
    weights: the version of the weights that the codes were made of, -1 where the cast was of no weight, or unknown.
    """

    of: Op
    codes_op: Op | None
    codes: Version | None
    descale: Version | None
    center: Version | None
    version: Version | None
    cached: bool = False
    weights: int = -1


class ModeRecord(NamedTuple):
    """The context that a quantize ran in; see qsim.sim.events.Mode. detected: "" where the quantizer has no belief."""

    enabled: bool = True
    fmt: str = ""
    grad: bool = True
    train: bool = True
    cache: bool = False
    group: str = ""
    bits: int = 0
    detected: str = ""


class FoldRecord(NamedTuple):
    """How a commit merged: "max", "last", "sum" ... within the unit; zero and nonfinite: names of rules, lower case."""

    merge: str = "max"
    zero: str = "skip"
    nonfinite: str = "latch"


class Saved(NamedTuple):
    """One live state in a checkpoint, or as it is after one was read: its epoch, and the epoch of its descale."""

    owner: str
    epoch: int
    descale: int


class Record(NamedTuple):
    """One event. ``kind``: begin, quantize, observe, commit, fetch, store, consume, load, drop, stash, restore,
    reduce, wait, optimize, compute, save, restart, restore_state, allocate.

    owner: the cell that the event touched ("" where none). epoch_before and epoch_after: of that cell.
    used: the version that a quantize encoded with, that a begin or fetch took, or that a store is based on.
    seen: the observations that a commit or store folded in (the last one alone, where it overwrites those before it),
    or that a wait returned.
    content: of the tensor that was loaded or observed. storage: which copy of the owner's state was touched.
    mode: of a quantize; fold: of a commit or store; part: what a store wrote, "all" but for a torn one.
    queue, got: of a stash or restore; got is the op whose entry came back, None for nothing. group, size: of a
    reduce or wait: the round, and the ranks that the caller expects. weights: the version that is live, of a load,
    consume, optimize, save or restore_state; weights_due: the version that a checkpoint holds. saved, pending: of a
    save or restore_state: the states and the number of queued entries that the checkpoint holds; now, now_pending:
    those that are live after it was read.
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
    content: str = ""
    storage: int = 0
    mode: ModeRecord | None = None
    fold: FoldRecord | None = None
    part: str = "all"
    queue: str = ""
    got: Op | None = None
    group: str = ""
    size: int = 0
    weights: int = -1
    weights_due: int = -1
    saved: tuple[Saved, ...] = ()
    now: tuple[Saved, ...] = ()
    pending: int = 0
    now_pending: int = 0
