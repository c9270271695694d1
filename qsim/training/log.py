"""What a training run leaves behind: one value a step and seed, native and never summarised away. Computes nothing."""

from __future__ import annotations

import msgspec

Row = tuple[float, ...]
"""One number a seed."""


class StepLog(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step, for R seeds; every tuple has one entry a seed.

    step: counted from 0 at the first step that counts (warm steps are not logged). loss: mean over the step's tokens,
    in nats, before the update. grad_norm: global 2-norm of the unscaled gradient (inf or nan where it is not finite).
    norm_by_layer: "L0" ... -> norm, "stem" and "tail" besides; norm_by_kind: kind of parameter ("qkv", "proj", "up",
    "down", "norm", "embed", "head") -> norm. dominant: the parameter with the largest norm, like "L3.qkv", the first
    non-finite one where there is one. lr, loss_scale: in force in this step. clipped, skipped: what happened; reason:
    why it was skipped, "" where it was not ("gradient is inf", "gradient is nan" ...). saturated, flushed: share of the
    elements of all casts of the step. tokens: of the step, over all microbatches.
    """

    step: int
    loss: Row
    grad_norm: Row
    norm_by_layer: dict[str, Row]
    norm_by_kind: dict[str, Row]
    dominant: tuple[str, ...]
    lr: Row
    loss_scale: Row
    clipped: tuple[bool, ...]
    skipped: tuple[bool, ...]
    reason: tuple[str, ...]
    finite_loss: tuple[bool, ...]
    saturated: Row
    flushed: Row
    tokens: int


class MatchedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of one layer, in forward and again in recompute.

    point: like "m0.w0.L3.qkv". same: bit for bit, a seed. digest_forward, digest_recompute: of all seeds together.
    max_abs: largest difference over elements that are finite in both; max_rel: relative to the largest magnitude of
    forward's tensor. finite_same: the same elements are finite. amax_forward, amax_recompute: largest finite magnitude.
    scale_forward, scale_recompute: in force in the cast of the product's left operand (0 where it is not cast).
    """

    step: int
    point: str
    same: tuple[bool, ...]
    digest_forward: str
    digest_recompute: str
    max_abs: Row
    max_rel: Row
    finite_same: tuple[bool, ...]
    amax_forward: Row
    amax_recompute: Row
    scale_forward: Row
    scale_recompute: Row


class TrainLog(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. scales: owner -> log2 of its live scale at the end, a seed. commits: owner -> number of commits, of
    the warm steps too. broken: invariants broken; expected: those that the catalogue foretells. digest: of each seed,
    sha256 over the bits of loss, grad_norm and skipped of every step.
    """

    seeds: tuple[int, ...]
    steps: tuple[StepLog, ...]
    matched: tuple[MatchedPoint, ...]
    scales: dict[str, Row]
    commits: dict[str, int]
    broken: tuple[str, ...]
    expected: tuple[str, ...]
    violations: int
    digest: tuple[str, ...]
    final_loss: Row
    """Mean loss over held-out batches after the last step; NaN where none was taken."""
