"""The sizes of one decoder's activations. Knows no array."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qsim.checks import whole_number
from qsim.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """B sequences of T tokens, d = heads x head_width; eps is what RMSNorm adds to the mean square.

    Activations are [R, N, d] with R replicas and N = B T tokens, those of a sequence one after another. UsageError: a
    size below 1, a width that the heads do not divide, an eps that is not positive.
    """

    batch: int
    context: int
    heads: int
    width: int
    vocabulary: int = 256
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            whole_number(field.name, getattr(self, field.name), least=1)
        if self.width % self.heads:
            raise UsageError(f"width {self.width} does not divide into {self.heads} heads; choose a multiple")
        if not self.eps > 0:
            raise UsageError(f"eps {self.eps} is not positive; 1e-5 is usual")

    @property
    def head_width(self) -> int:
        """Elements of a query, key or value of one head."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """N: tokens of one replica's batch."""
        return self.batch * self.context
