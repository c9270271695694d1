"""Presets: how one real system runs the life of a state. One literal each, policy axes as data; knows no defect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from qsim.quant import Fallback, InitialScale, MergeRule, NonFiniteRule, ScaleGrid, WindowRule, ZeroRule


class Verb(Enum):
    """The steps that a preset orders for one operand."""

    BEGIN = "begin"
    QUANTIZE = "quantize"
    OBSERVE = "observe"
    COMMIT = "commit"


class Reads(Enum):
    """Where a consumer takes descale and centre from."""

    SNAPSHOT = "the snapshot that the codes were made with"
    LIVE = "the live state at the time of the GEMM"
    RAW = "nowhere: the tensor was never cast"


class Cadence(Enum):
    """The logical unit of a commit."""

    MICROBATCH = "microbatch"
    STEP = "step"
    NEVER = "never"


class Trigger(Enum):
    """What makes a commit happen."""

    CAST = "every cast, inside the call"
    EXIT = "the end of a pass: forward leaves its region, backward its last module"
    CALL = "an explicit call once a step"
    GRADIENTS = "the application of the gradients, once a step"
    NEVER = "nothing"


class Keeps(Enum):
    """Where recompute finds what forward encoded with."""

    SLOT = "a snapshot under the operation's own key"
    FIFO = "a queue a module, oldest first"
    LIFO = "a queue a module, newest first"
    LIVE = "nowhere: it reads the live state again"


class Detects(Enum):
    """How the quantizer knows in which phase it is."""

    CALLER = "the caller says so"
    GLOBAL_FLAG = "a global flag that the checkpoint sets"
    PURITY = "it need not know: it is a pure function, and what recompute returns is thrown away"
    NOTHING = "it does not know"


class Reduces(Enum):
    """Which ranks agree on an amax before a commit."""

    OWNER = "the ranks that hold a replica of the state"
    GROUP = "a declared group, forward and backward apart"
    WORLD = "all ranks"
    SHARDING = "those that the compiler's sharding implies"
    NOTHING = "none: each rank has a state of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a preset breaks by itself on schedules that have all of ``features`` and none of ``unless``."""

    features: frozenset[str]
    breaks: frozenset[str]
    because: str
    unless: frozenset[str] = frozenset()

    def on(self, traits: frozenset[str]) -> bool:
        """True where a schedule with these traits shows it."""
        return self.features <= traits and not self.unless & traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """forward, recompute: what happens to each operand before its GEMM, in order.

    rules: options of a recipe with memory by which this system differs (zero rule, window convention, merge rule,
    initial state ...), as pairs of name and value. breaks: the invariants that this order breaks by itself, on every
    schedule but for those that it spares where a trait is there; faults: those that it breaks on some. Empty for a
    correct protocol. any_unit: the protocol is as right with commits once a step as once a microbatch; a real system
    under another unit than its ``cadence`` is another protocol, of which breaks and faults say nothing.
    """

    name: str
    forward: tuple[Verb, ...]
    recompute: tuple[Verb, ...]
    reads: Reads
    cadence: Cadence
    trigger: Trigger
    keeps: Keeps = Keeps.SLOT
    detects: Detects = Detects.CALLER
    reduces: Reduces = Reduces.OWNER
    rules: tuple[tuple[str, Any], ...] = ()
    any_unit: bool = False
    breaks: frozenset[str] = frozenset()
    spares: tuple[tuple[str, frozenset[str]], ...] = ()
    faults: tuple[Fault, ...] = ()
    story: str

    def breaks_on(self, traits: frozenset[str]) -> frozenset[str]:
        """The invariants that this preset breaks by itself, under its own unit, on a schedule with these traits."""
        spared = frozenset[str]().union(*(spared for trait, spared in self.spares if trait in traits))
        return (self.breaks - spared).union(*(fault.breaks for fault in self.faults if fault.on(traits)))


_CAST = (Verb.BEGIN, Verb.QUANTIZE, Verb.OBSERVE)
_ALL = (*_CAST, Verb.COMMIT)
_CAREFUL = (("nonfinite_rule", NonFiniteRule.FINITE),)
_INF_ENTERS = Fault(
    features=frozenset({"overflow"}),
    breaks=frozenset({"I12"}),
    because="an Inf enters the window and speaks for as long as it stays there",
)
_ZERO_ENTERS = Fault(
    features=frozenset({"idle_expert"}),
    breaks=frozenset({"I5"}),
    because="the amax of a tensor without tokens enters the window",
)


def _last_speaks(*features: str) -> tuple[Fault, ...]:
    because = "a later observation of the unit overwrites those before it"
    found = [Fault(features=frozenset({f}), breaks=frozenset({"I5"}), because=because) for f in features]
    return (*found, replace(_INF_ENTERS, unless=frozenset(features)))  # there the Inf is overwritten too


def _mispairs(breaks: set[str], *features: str) -> Fault:
    because = "the queue of a module hands out an entry of another operation"
    never = frozenset({"nothing recomputed"})
    return Fault(features=frozenset(features), breaks=frozenset(breaks), because=because, unless=never)


_TE_FAULTS = (
    _INF_ENTERS,
    _mispairs({"I2", "I10"}, "forward_first", "accumulation"),
    _mispairs({"I2", "I10"}, "nested"),
    _mispairs({"I10"}, "twice"),
    _mispairs({"I10"}, "shared"),
)

SEED_CORRECT = Preset(
    name="seed_correct",
    forward=_ALL,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.CAST,
    rules=_CAREFUL,
    any_unit=True,
    story="Snapshot first; one commit after the encode; every consumer and the recompute read the snapshot.",
)
SEED_DEFECTIVE = Preset(
    name="seed_defective",
    forward=_ALL,
    recompute=_ALL,
    reads=Reads.LIVE,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.CAST,
    keeps=Keeps.LIVE,
    detects=Detects.NOTHING,
    rules=_CAREFUL,
    breaks=frozenset({"I1", "I2", "I3", "I5"}),
    spares=(("nothing recomputed", frozenset({"I2", "I3", "I5"})),),
    faults=(
        Fault(
            features=frozenset({"weight_cache", "weights"}),
            breaks=frozenset({"I9"}),
            because="the state of a cached cast moves on, and its descale is read live",
        ),
    ),
    story="The quantizer advances inside the call, the GEMM reads the live descale, recompute does it all again.",
)
TE_FUSED = Preset(
    name="te_fused",
    forward=_CAST,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.EXIT,
    keeps=Keeps.FIFO,
    detects=Detects.GLOBAL_FLAG,
    reduces=Reduces.GROUP,
    faults=_TE_FAULTS,
    story="Transformer Engine, delayed scaling, fused update: the region's exit commits every microbatch, a FIFO a "
    "module carries scales to recompute; a zero amax does not roll the window.",
)
TE_UNFUSED = Preset(
    name="te_unfused",
    forward=_CAST,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.EXIT,
    keeps=Keeps.FIFO,
    detects=Detects.GLOBAL_FLAG,
    reduces=Reduces.GROUP,
    rules=(("zero_rule", ZeroRule.ROLL),),
    faults=(*_TE_FAULTS, _ZERO_ENTERS),
    story="Transformer Engine, delayed scaling, update tensor by tensor: as te_fused, but a zero amax rolls in.",
)
TORCHAO_DELAYED = Preset(
    name="torchao_delayed",
    forward=_CAST,
    recompute=(Verb.BEGIN, Verb.QUANTIZE),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.STEP,
    trigger=Trigger.CALL,
    keeps=Keeps.LIVE,
    detects=Detects.NOTHING,
    reduces=Reduces.WORLD,
    rules=(
        ("zero_rule", ZeroRule.CLAMP),
        ("nonfinite_rule", NonFiniteRule.PROPAGATE),
        ("initial_rule", InitialScale.FROM_DATA),
        ("merge_rule", MergeRule.LAST),
    ),
    faults=(_ZERO_ENTERS, *_last_speaks("accumulation", "shared states", "twice", "shared")),
    story="torchao's delayed scaling: one call a step renews every scale, so recompute may read the live state; each "
    "cast overwrites the amax, so the last microbatch of a step speaks for all.",
)
FLAX = Preset(
    name="flax",
    forward=_CAST,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.STEP,
    trigger=Trigger.GRADIENTS,
    detects=Detects.PURITY,
    reduces=Reduces.SHARDING,
    rules=(("zero_rule", ZeroRule.ROLL), ("window_rule", WindowRule.EXCLUDED)),
    faults=(_ZERO_ENTERS, _INF_ENTERS),
    story="flax: the state goes in as a parameter and its successor comes out as its gradient, applied once a step.",
)
TE_JAX = Preset(
    name="te_jax",
    forward=_ALL,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.CAST,
    detects=Detects.PURITY,
    reduces=Reduces.SHARDING,
    rules=(("zero_rule", ZeroRule.ROLL), ("merge_rule", MergeRule.LAST)),
    faults=(_ZERO_ENTERS, *_last_speaks("twice", "shared")),
    story="Transformer Engine for JAX: every quantize returns the next state; recompute gets forward's as its input.",
)
MSAMP = Preset(
    name="msamp",
    forward=_ALL,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    trigger=Trigger.CAST,
    reduces=Reduces.WORLD,
    rules=(
        ("nonfinite_rule", NonFiniteRule.INVERT),
        ("initial_rule", InitialScale.WARM_UP),
        ("merge_rule", MergeRule.LAST),
        ("grid", ScaleGrid.POWER_OF_TWO),
        ("fallback", Fallback.LIVE),
    ),
    faults=_last_speaks("twice", "shared"),
    story="MS-AMP: every cast renews a power-of-two scale, and the tensor refers to the metadata it was made with.",
)
CURRENT = Preset(
    name="current",
    forward=(Verb.OBSERVE, Verb.BEGIN, Verb.QUANTIZE),
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.NEVER,
    trigger=Trigger.NEVER,
    detects=Detects.PURITY,
    reduces=Reduces.NOTHING,
    story="Just-in-time scaling: the scale comes from the tensor in hand, nothing is remembered or committed.",
)
NONE = Preset(
    name="none",
    forward=(),
    recompute=(),
    reads=Reads.RAW,
    cadence=Cadence.NEVER,
    trigger=Trigger.NEVER,
    keeps=Keeps.LIVE,
    reduces=Reduces.NOTHING,
    story="High-precision control: nothing is cast, so no lifecycle can go wrong.",
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            SEED_CORRECT,
            SEED_DEFECTIVE,
            TE_FUSED,
            TE_UNFUSED,
            TORCHAO_DELAYED,
            FLAX,
            TE_JAX,
            MSAMP,
            CURRENT,
            NONE,
        )
    }
)
