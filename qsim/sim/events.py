"""What can happen in a schedule: one NamedTuple an event, plain names and ids. Knows no tensor and no verdict."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import NamedTuple

from qsim.quant import MergeRule, NonFiniteRule, OpId, StateKey, ZeroRule


class Phase(StrEnum):
    """When an event happens. A graph replay or the rerun of a step has the phases of the work that it does."""

    FORWARD = "f"
    RECOMPUTE = "r"
    BACKWARD = "b"
    UPDATE = "u"
    EVALUATE = "e"
    CALIBRATE = "cal"
    CAPTURE = "cap"
    PADDING = "pad"


METADATA_FIELDS = ("descale", "center", "version")

Slot = str
"""Name of a place for a value. Slots are reused from step to step, so memory stays bounded and visible."""


class Content(StrEnum):
    """What a tensor holds, where that matters to the life of a state."""

    NORMAL = ""
    EMPTY = "empty"  # no tokens were routed here: zeros, amax 0
    NONFINITE = "nonfinite"  # one element is Inf


class Mode(NamedTuple):
    """The context that a quantizer runs in: what recompute must repeat.

    enabled: low precision is on. fmt: format that the region asks for, "" for the recipe's. grad, train, cache: the
    flags of gradient mode, of training and of the weight cache. group: ranks that a reduction spans. bits: which
    random words are drawn (0: those of the operation). detected: the phase that the quantizer believes to be in.
    """

    enabled: bool = True
    fmt: str = ""
    grad: bool = True
    train: bool = True
    cache: bool = False
    group: str = ""
    bits: int = 0
    detected: Phase | None = None


PLAIN = Mode()


class Fold(NamedTuple):
    """How a commit folds its observations in: the rule within the unit, that for an amax of 0, for Inf and NaN.

    amount: the bound of MergeRule.CLIP or the factor of DECAY.
    """

    merge: MergeRule = MergeRule.MAX
    zero: ZeroRule = ZeroRule.SKIP
    nonfinite: NonFiniteRule = NonFiniteRule.LATCH
    amount: float | None = None


DEFAULT_FOLD = Fold()


class Part(StrEnum):
    """What a torn commit writes at once."""

    ALL = "all"
    SCALE = "scale"  # scale, centre, history and epoch; the descale follows
    DESCALE = "descale"


class Take(Enum):
    """Which entry of a queue a restore takes."""

    KEYED = "the one of its own operation"
    FIFO = "the oldest"
    LIFO = "the newest"


class Load(NamedTuple):
    """Bring the tensor of ``key`` in: the same tensor however often it is loaded."""

    phase: Phase
    key: OpId
    out: Slot
    content: Content = Content.NORMAL


class Compute(NamedTuple):
    """Apply the node ``node``, a name in the table of the env, to values: no cast and no product is in it.

    at: the layer visit that it belongs to; its role is WEIGHT where ``outs`` are parameters.
    """

    phase: Phase
    at: OpId
    node: str
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]


class Begin(NamedTuple):
    """Freeze the state of ``cell`` for ``op``. obs: the observation that current scaling needs, else None."""

    phase: Phase
    op: OpId
    cell: StateKey
    into: Slot
    obs: Slot | None = None


class Quantize(NamedTuple):
    """Encode ``src`` with the metadata in ``by``, in the context ``mode``."""

    phase: Phase
    op: OpId
    src: Slot
    by: Slot
    out: Slot
    mode: Mode = PLAIN


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
    fold: Fold = DEFAULT_FOLD


class Fetch(NamedTuple):
    """Read the live state of ``cell`` as it is now."""

    phase: Phase
    op: OpId
    cell: StateKey
    into: Slot


class Store(NamedTuple):
    """Write to ``cell`` the successor of the state fetched into ``base``: half of a torn commit, or a ``part``."""

    phase: Phase
    op: OpId
    cell: StateKey
    base: Slot
    obs: tuple[Slot, ...]
    fold: Fold = DEFAULT_FOLD
    part: Part = Part.ALL


class Operand(NamedTuple):
    """What a consumer decodes: ``codes``, with metadata that it names itself.

    of: the quantize that it means to decode. descale, center, version: the slots (snapshots or fetched
    states) that each is read from; all None for a tensor that was never cast, center None without a centre.
    cached: the codes come from a weight cache, so ``of`` is the quantize that filled it.
    """

    of: OpId
    codes: Slot
    descale: Slot | None
    center: Slot | None
    version: Slot | None
    cached: bool = False

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
    """A GEMM: decode both operands by name, multiply. gemm: which one; ``qsim.sim.products.FORMS`` has them all."""

    phase: Phase
    op: OpId
    gemm: str
    operands: tuple[Operand, Operand]
    out: Slot

    def with_operands(self, change: Callable[[Operand], Operand]) -> Consume:
        """The same GEMM with both operands changed."""
        left, right = self.operands
        return self._replace(operands=(change(left), change(right)))


class Stash(NamedTuple):
    """Put the value of ``slot`` at the end of ``queue``."""

    phase: Phase
    op: OpId
    queue: str
    slot: Slot


class Restore(NamedTuple):
    """Take an entry of ``queue`` out, into a slot. Where there is none, the live state of ``cell`` is frozen instead:
    what a quantizer goes on with into which nothing was swapped back.
    """

    phase: Phase
    op: OpId
    queue: str
    into: Slot
    take: Take
    cell: StateKey


class Group(NamedTuple):
    """Ranks that reduce together, as the calling rank sees them: a name a round, and how many take part."""

    name: str
    size: int


class Reduce(NamedTuple):
    """Start a reduction: hand the observation of one rank to its group."""

    phase: Phase
    op: OpId
    group: Group
    obs: Slot


class Wait(NamedTuple):
    """End a reduction: the merged observation of all that have been handed in by now."""

    phase: Phase
    op: OpId
    group: Group
    into: Slot


class Optimize(NamedTuple):
    """The optimizer changes every weight: their version moves on by one."""

    phase: Phase
    op: OpId


class SaveState(NamedTuple):
    """Write live states, the version of the weights and every queue into a checkpoint."""

    phase: Phase
    cells: tuple[StateKey, ...]
    into: Slot


class Restart(NamedTuple):
    """The process ends and another begins: all states, queues and slots are gone but the ``keep``."""

    phase: Phase
    keep: tuple[Slot, ...]


class LoadState(NamedTuple):
    """Read a checkpoint back: of all that it holds, the ``parts`` "state", "descale", "weights", "queues"."""

    phase: Phase
    source: Slot
    parts: tuple[str, ...] = ("state", "descale", "weights", "queues")


class Allocate(NamedTuple):
    """Reserve a buffer of codes that nothing has been written to; until then it holds what memory held."""

    phase: Phase
    like: OpId
    slots: tuple[Slot, ...]


class Drop(NamedTuple):
    """Free slots."""

    phase: Phase
    slots: tuple[Slot, ...]


Event = (
    Load
    | Compute
    | Begin
    | Quantize
    | Observe
    | Commit
    | Fetch
    | Store
    | Consume
    | Stash
    | Restore
    | Reduce
    | Wait
    | Optimize
    | SaveState
    | Restart
    | LoadState
    | Allocate
    | Drop
)
Schedule = tuple[Event, ...]
