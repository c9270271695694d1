"""What is replayed: sizes, an order, features. Writes no event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from qsim.errors import UsageError

MAX_VISITS = 1_000_000
"""Layer visits of one replay: a schedule is held in memory whole."""


class Order(Enum):
    """How the microbatches of one step follow each other."""

    FORWARD_FIRST = "forward_first"  # all forwards, then all backwards in reverse: GPipe's flush
    ALTERNATE = "alternate"  # forward and backward of one, then of the next: gradient accumulation
    ONE_F_ONE_B = "1f1b"  # pipeline stages, one forward one backward
    INTERLEAVED = "interleaved"  # the same, every stage holding two chunks of layers
    ZERO_BUBBLE = "zero_bubble"  # the same, gradients of weights put off

    @property
    def pipelined(self) -> bool:
        """True where the layers are split over stages."""
        return self in (Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.ZERO_BUBBLE)


class Feature(StrEnum):
    """What else a schedule does. Features of one group exclude each other (see GROUPS)."""

    NO_CHECKPOINT = "no_checkpoint"  # backward reads what forward made; nothing is recomputed
    SELECTIVE = "selective"  # attention scores alone are recomputed, or the last GEMM where there are none
    NESTED = "nested"  # a checkpoint around all layers and one around each: two recomputes
    EARLY_STOP = "early_stop"  # recompute ends when backward has what it needs
    TWICE = "twice"  # every module is entered twice in a row
    SHARED = "shared"  # all layers are run twice, one after the other: two positions share a module
    EVALUATION = "evaluation"  # a pass before every step that trains nothing
    CALIBRATION = "calibration"  # a high-precision pass before every step that looks at amaxes
    PADDING = "padding"  # a microbatch of padding before every step
    WEIGHT_CACHE = "weight_cache"  # weights are cast in the first microbatch of a step and read from a cache after
    SAVE_RESTORE = "save_restore"  # after the first step the process ends and another one goes on
    GRAPH_CAPTURE = "graph_capture"  # a capture pass comes first; all steps are replays of it
    RERUN = "rerun"  # the last step is taken back and run again
    IDLE_EXPERT = "idle_expert"  # in odd steps no token reaches the last layer
    OVERFLOW = "overflow"  # one activation of the first GEMM is Inf once
    DATA_PARALLEL = "data_parallel"  # workers are ranks, each with its own microbatches and states, reduced
    TENSOR_PARALLEL = "tensor_parallel"  # workers are ranks that share every microbatch
    MIXED_FORMATS = "mixed_formats"  # the last GEMM of a layer is cast to another format


GROUPS: tuple[tuple[str, tuple[Feature, ...]], ...] = (
    ("checkpoint", (Feature.NO_CHECKPOINT, Feature.SELECTIVE, Feature.NESTED, Feature.EARLY_STOP)),
    ("entry", (Feature.TWICE, Feature.SHARED)),
    ("interlude", (Feature.EVALUATION, Feature.CALIBRATION, Feature.PADDING)),
    ("weight cache", (Feature.WEIGHT_CACHE,)),
    ("process", (Feature.SAVE_RESTORE, Feature.RERUN)),
    ("graph", (Feature.GRAPH_CAPTURE,)),
    ("content", (Feature.IDLE_EXPERT, Feature.OVERFLOW)),
    ("ranks", (Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL)),
    ("formats", (Feature.MIXED_FORMATS,)),
)
"""Group -> its features; a schedule has at most one of each group."""

CHUNKS = 2
"""Chunks of layers that a stage of an interleaved pipeline holds."""


class Linear(NamedTuple):
    """INPUT [tokens, in] @ WEIGHT [in, out]; with gradients also dX = dY W^T and dW = X^T dY."""

    site: int
    gradients: bool = False


class Scores(NamedTuple):
    """ATTN_Q [tokens, head] @ ATTN_K [tokens, head]^T."""

    site: int


Body = tuple[Linear | Scores, ...]


class SpecError(UsageError):
    """Sizes, order and features that do not fit. ``problems``: one line each, the key first."""

    def __init__(self, problems: Sequence[str]) -> None:
        """All problems of one spec."""
        super().__init__("\n  ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """How much is replayed. Microbatch m runs on worker m % workers; workers proceed in step, layer by layer.

    first: number of the first step. stages: of a pipelined order. features: what else happens. Raises SpecError, with
    everything that is wrong, where sizes, order and features do not fit.
    """

    steps: int = 2
    microbatches: int = 1
    layers: int = 2
    workers: int = 1
    order: Order = Order.FORWARD_FIRST
    stages: int = 2
    features: frozenset[Feature] = frozenset()
    first: int = 0

    def __post_init__(self) -> None:
        sizes = ("steps", "microbatches", "layers", "workers", "stages")
        wrong = [
            f"schedule.{name} is {getattr(self, name)}; it must be at least 1"
            for name in sizes
            if getattr(self, name) < 1
        ]
        if self.first < 0:
            wrong.append(f"schedule.first is {self.first}; steps count from 0")
        wrong = wrong or [*self._sizes_apart(), *self._features_apart(), *self._pipeline_apart()]
        if wrong:
            raise SpecError(wrong)

    def _sizes_apart(self) -> Iterator[str]:
        visits = self.steps * self.microbatches * self.layers
        if visits > MAX_VISITS:
            yield (
                f"schedule: {self.steps} steps x {self.microbatches} microbatches x {self.layers} layers are {visits} "
                f"layer visits; one replay takes at most {MAX_VISITS}"
            )
        if self.microbatches % self.workers and Feature.TENSOR_PARALLEL not in self.features:
            yield (
                f"schedule.microbatches {self.microbatches} is no multiple of schedule.workers {self.workers}; "
                f"each worker runs whole microbatches"
            )

    def _features_apart(self) -> Iterator[str]:
        for name, group in GROUPS:
            both = [feature for feature in group if feature in self.features]
            if len(both) > 1:
                yield f"schedule.features {' and '.join(both)} are all of group {name}; keep one of them"
        for feature, steps in ((Feature.SAVE_RESTORE, 2), (Feature.IDLE_EXPERT, 2)):
            if feature in self.features and self.steps < steps:
                yield f"schedule.features {feature} needs schedule.steps >= {steps}; it is {self.steps}"
        if self.ranks == 1 and self.features & {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL}:
            yield "schedule.features of parallel ranks need schedule.workers >= 2; it is 1"

    def _pipeline_apart(self) -> Iterator[str]:
        if not self.order.pipelined:
            return
        if self.layers < self.chunks:
            yield (
                f"schedule.order {self.order.value} splits {self.layers} layer(s) over {self.chunks} parts "
                f"(schedule.stages {self.stages}); take more layers or fewer stages"
            )
        if self.order is Order.INTERLEAVED and self.batches % self.stages:
            yield (
                f"schedule.order interleaved runs {self.batches} microbatches a worker in groups of "
                f"schedule.stages {self.stages}; take a multiple of it"
            )

    @property
    def chunks(self) -> int:
        """Parts that the layers are split into, one after the other."""
        if not self.order.pipelined:
            return 1
        return self.stages * (CHUNKS if self.order is Order.INTERLEAVED else 1)

    @property
    def ranks(self) -> int:
        """Workers whose states are replicas; 1 where workers are no ranks."""
        return self.workers if self.features & {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL} else 1

    @property
    def batches(self) -> int:
        """Microbatches that follow each other on one worker."""
        return self.microbatches if Feature.TENSOR_PARALLEL in self.features else self.microbatches // self.workers

    @property
    def visits(self) -> int:
        """How often a module is entered in one forward."""
        return 2 if self.features & {Feature.TWICE, Feature.SHARED} else 1

    def traits(self) -> frozenset[str]:
        """All that a fault or a defect may ask for: features, the order, "accumulation", "workers", "ranks", "shared
        states", "pipeline", "recompute", "several layers", "later steps".
        """
        found = {feature.value for feature in self.features} | {self.order.value}
        found |= {"recompute"} if Feature.NO_CHECKPOINT not in self.features else set()
        found |= {"several layers"} if self.layers > 1 else set()
        found |= {"later steps"} if self.steps > 1 else set()
        found |= {"accumulation"} if self.batches > 1 else set()
        found |= {"workers"} if self.workers > 1 else set()
        found |= {"ranks"} if self.ranks > 1 else set()
        found |= {"shared states"} if self.workers > self.ranks else set()
        found |= {"pipeline"} if self.order.pipelined else set()
        return frozenset(found)


def features_of(names: Iterable[str]) -> frozenset[Feature]:
    """Features by name; UsageError for an unknown one."""
    known = {feature.value: feature for feature in Feature}
    found = []
    for name in names:
        if name not in known:
            raise UsageError(f'schedule.features "{name}" is unknown; known: {", ".join(known)}')
        found.append(known[name])
    return frozenset(found)
