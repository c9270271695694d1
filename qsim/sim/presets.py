"""Presets: how one real system orders the events of a cast. One literal each; knows no defect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """forward, recompute: what happens to each operand before its GEMM, in order.

    breaks: the invariants that this order breaks by itself; empty for a correct protocol.
    """

    name: str
    forward: tuple[Verb, ...]
    recompute: tuple[Verb, ...]
    reads: Reads
    cadence: Cadence
    breaks: frozenset[str] = frozenset()
    story: str


_ALL = (Verb.BEGIN, Verb.QUANTIZE, Verb.OBSERVE, Verb.COMMIT)

SEED_CORRECT = Preset(
    name="seed_correct",
    forward=_ALL,
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.MICROBATCH,
    story="Snapshot first; one commit after the encode; every consumer and the recompute read the snapshot.",
)
SEED_DEFECTIVE = Preset(
    name="seed_defective",
    forward=_ALL,
    recompute=_ALL,
    reads=Reads.LIVE,
    cadence=Cadence.MICROBATCH,
    breaks=frozenset({"I1", "I2", "I3", "I5"}),
    story="The quantizer advances inside the call, the GEMM reads the live descale, recompute does it all again.",
)
CURRENT = Preset(
    name="current",
    forward=(Verb.OBSERVE, Verb.BEGIN, Verb.QUANTIZE),
    recompute=(Verb.QUANTIZE,),
    reads=Reads.SNAPSHOT,
    cadence=Cadence.NEVER,
    story="Just-in-time scaling: the scale comes from the tensor in hand, nothing is remembered or committed.",
)
NONE = Preset(
    name="none",
    forward=(),
    recompute=(),
    reads=Reads.RAW,
    cadence=Cadence.NEVER,
    story="High-precision control: nothing is cast, so no lifecycle can go wrong.",
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {preset.name: preset for preset in (SEED_CORRECT, SEED_DEFECTIVE, CURRENT, NONE)}
)
