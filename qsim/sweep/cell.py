"""One point of a grid and what came out of it: plain values only. Knows neither files nor processes."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ScheduleParams(msgspec.Struct, frozen=True, kw_only=True):
    """How much is replayed: S steps x M microbatches x L layers on W workers.

    features: names in the order of their registry. text: a schedule written by hand, in the notation's own spelling;
    the sizes are then those of the text, and order, stages and features mean nothing. LATER: fields that came later;
    where one has its default it is no part of a case's identity, so that older cases keep theirs.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"stages", "features", "text"})

    steps: int = 20
    microbatches: int = 1
    layers: int = 4
    workers: int = 1
    order: str = "forward_first"
    stages: int = 2
    features: tuple[str, ...] = ()
    text: str = ""


class WorkloadParams(msgspec.Struct, frozen=True, kw_only=True):
    """What flows through the schedule. ``tensors`` is a capture file, or "builtin" for the one that ships.

    tensors_digest: sha256 of the file's bytes (filled in when the study is read, so that a case is tied to
    the data and not to a path). mean_shift, layer_spread, outlier_* shape the data and are printed when used.
    """

    kind: str = "replay"
    tensors: str = "builtin"
    tensors_digest: str = ""
    tokens: int = 4
    outputs: int = 8
    mean_shift: float = 0.0
    layer_spread: tuple[int, ...] = ()
    outlier_steps: tuple[int, ...] = ()
    outlier_factor: float = 8.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One case of the grid with all of its replicas (seeds ``seed`` .. ``seed + replicas - 1``).

    defect: a catalogue id ("D01"), or a control: "correct", "high_precision", "stale_scale".
    """

    defect: str
    fmt: str
    recipe: str
    window: int
    preset: str
    seed: int
    replicas: int
    skip_steps: int
    backend: str
    reproducible: bool
    schedule: ScheduleParams
    workload: WorkloadParams

    @property
    def name(self) -> str:
        """The cell in one line, for messages."""
        return f"{self.defect} {self.fmt} {self.recipe} window {self.window}"


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one cell. Errors are relative L2 errors of GEMM outputs against the correct twin.

    status: "ok", or "not_applicable" with the missing feature in ``note``.
    rel_error_*: over all replicas, steps >= skip_steps, microbatches, layers and GEMMs, the worse of forward
    and recompute; rel_error_replica: the median of each replica. reference_error*: against high precision.
    replay_mismatch: share of GEMMs whose recomputed output differs from the forward's in any bit.
    gain_median: median of max(g, 1/g), g = descale used / descale paired, multiplied over a GEMM's operands, the
    larger of forward and recompute;
    gain_max: the g farthest from 1. k: median |mean| / sigma of the encoded activations. Shares are of elements.
    """

    status: str
    note: str = ""
    broken: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    violations: int = 0
    commits: int = 0
    commits_expected: int = 0
    rel_error_median: float = 0.0
    rel_error_p99: float = 0.0
    rel_error_max: float = 0.0
    rel_error_replica: tuple[float, ...] = ()
    reference_error_median: float = 0.0
    reference_error_correct: float = 0.0
    replay_mismatch: float = 0.0
    code_match: float = 1.0
    gain_median: float = 1.0
    gain_max: float = 1.0
    center_gap_median: float = 0.0
    ulp_median: float = 0.0
    max_abs_error: float = 0.0
    saturated_share: float = 0.0
    flushed_share: float = 0.0
    nonfinite_outputs: int = 0
    outputs: int = 0
    nonfinite_replicas: int = 0
    k: float = 0.0
    distinct_rows: int = 0
    output_digest: str = ""

    @property
    def as_expected(self) -> bool:
        """True where the invariants broken are exactly those that the catalogue names."""
        return self.status != "ok" or set(self.broken) == set(self.expected)
