"""Who acts and who owns: operations and the owners of quantizer state. Knows no number and no schedule."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from qsim.philox import Purpose, RandomStream

ANY = -1
"""In a StateKey: every operation, whatever its value of this field, shares the state."""


class TensorRole(IntEnum):
    """What a tensor is to its GEMM; ``role_id = int(role)``."""

    INPUT = 0
    WEIGHT = 1
    GRAD_OUTPUT = 2
    ATTN_Q = 3
    ATTN_K = 4
    ATTN_V = 5
    ATTN_P = 6


class Site(IntEnum):
    """Which GEMM of a layer an operation belongs to; of a parameter that no GEMM multiplies, which one it is."""

    QKV = 0
    SCORES = 1
    FFN_UP = 2
    FFN_DOWN = 3
    PROJ = 4
    VALUES = 5
    HEAD = 6
    EMBED = 7
    POSITIONS = 8
    NORM_ATTN = 9
    NORM_FFN = 10
    NORM_FINAL = 11


def _name(kind: type[IntEnum], value: int) -> str:
    """The member's name, or the number of a site or role that somebody else defined."""
    return kind(value).name if value in list(kind) else f"{kind.__name__}{value}"


class OpId(NamedTuple):
    """One logical operation: one cast of one tensor in one step. Recompute is the same op, entered again."""

    logical_step: int
    microbatch: int = 0
    layer_id: int = 0
    site: int = 0
    role_id: int = 0
    worker_id: int = 0
    visit: int = 0

    def stream(self, seed: int, purpose: Purpose = Purpose.ROUNDING) -> RandomStream:
        """The random words of this operation: element e of its tensor, in C order, has word e.

        ``visit`` has no field in the counter: a recompute draws the words of the forward, as it must. Whoever
        wants other words in another visit passes another seed.
        """
        return RandomStream(
            seed,
            purpose,
            step=self.logical_step,
            microbatch=self.microbatch,
            worker=self.worker_id,
            layer=self.layer_id,
            site=self.site,
            role=self.role_id,
        )

    def __str__(self) -> str:
        return (
            f"step {self.logical_step} microbatch {self.microbatch} layer {self.layer_id} "
            f"{_name(Site, self.site)}.{_name(TensorRole, self.role_id)} worker {self.worker_id}"
        )


class StateKey(NamedTuple):
    """Who owns a state. A field that is ANY is shared by all its values: StateKey(layer_id=ANY) serves all layers.

    copy: which storage of that owner's state; 0 is the live one, and its name is the owner's whatever the copy.
    """

    layer_id: int = ANY
    site: int = ANY
    role_id: int = ANY
    worker_id: int = ANY
    copy: int = 0

    def owns(self, op: OpId) -> bool:
        """True where ``op`` is one of this owner's operations."""
        mine = (op.layer_id, op.site, op.role_id, op.worker_id)
        return all(own in (ANY, its) for own, its in zip(self[:4], mine, strict=True))

    def __str__(self) -> str:
        layer = "L*" if self.layer_id == ANY else f"L{self.layer_id}"
        site = "*" if self.site == ANY else _name(Site, self.site).lower()
        role = "*" if self.role_id == ANY else _name(TensorRole, self.role_id).lower()
        worker = "" if self.worker_id == ANY else f"/w{self.worker_id}"
        return f"{layer}/{site}/{role}{worker}"
