"""What events need from outside: tensors, a backend, recipes, a cast policy, nodes, products. Holds no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qsim.arrays import F32, AnyArray, frozen
from qsim.backends.protocol import Backend, CastSpec
from qsim.errors import UsageError
from qsim.formats import CastPolicy, RoundMode
from qsim.philox import RandomStream
from qsim.quant import OpId, QuantizedTensor, QuantSnapshot, QuantState, Recipe
from qsim.quant.state import center_over
from qsim.sim.products import multiply

Metadata = QuantSnapshot | QuantState
NodeFunction = Callable[..., tuple[Any, ...]]
"""(at, *values of ins) -> values of outs, all new; nothing is written in place."""
_OTHER_WORDS = 0x9E3779B97F4A7C15
"""Odd, of 64 bits: a seed combined with a multiple of it is not the seed of a neighbouring replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """What events need from outside: tensors by key, a backend, recipes, a cast policy, the replica axes.

    lead: (R,), the replicas; R = 1 is the single case. reproducible: products are exact sums rounded once; False
    takes the plain float32 BLAS product, whose bits depend on the machine. seeds: of stochastic rounding, one a
    replica; none where the policy draws nothing. recipes: of roles that have one of their own, ``recipe`` serves all
    others. nodes: the table of Compute events. product: (name, left, right) -> out in place of the plain products of
    matrices. ahead: a cast decodes its own codes in the same pass, for whoever will decode with its snapshot: faster
    where nearly everybody does. Holds no state.
    """

    load: Callable[[OpId], F32]
    backend: Backend
    recipe: Recipe
    policy: CastPolicy
    lead: tuple[int]
    reproducible: bool = True
    seeds: tuple[int, ...] = ()
    recipes: Mapping[int, Recipe] = field(default_factory=dict)
    nodes: Mapping[str, NodeFunction] = field(default_factory=dict)
    product: Callable[[str, F32, F32], F32] | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        if len(self.lead) != 1 or self.lead[0] < 1:
            raise UsageError(f"lead {self.lead} is no replica axis; the simulator runs [R, ...] with lead=(R,), R >= 1")
        draws = self.policy.rounding is RoundMode.STOCHASTIC
        if len(self.seeds) != (self.lead[0] if draws else 0):
            raise UsageError(
                f"policy {self.policy.name} rounds by {self.policy.rounding.value!r} and the env has "
                f"{len(self.seeds)} seed(s) for {self.lead[0]} replica(s); give one a replica to stochastic rounding, "
                "and none to any other"
            )
        for recipe in (self.recipe, *self.recipes.values()):
            _check_recipe(recipe)

    @property
    def tensors(self) -> type[AnyArray]:
        """Type of the backend's arrays."""
        found: type[AnyArray] = self.backend.xp.ndarray
        return found

    def recipe_of(self, role_id: int) -> Recipe:
        """The recipe of a role; of ANY role, the one that serves those without their own."""
        return self.recipes.get(role_id, self.recipe)

    def words(self, op: OpId, bits: int) -> tuple[RandomStream, ...]:
        """The random words that a cast of ``op`` draws, one stream a replica: its own where ``bits`` is 0."""
        return tuple(op.stream(seed ^ (bits * _OTHER_WORDS % 2**64)) for seed in self.seeds)

    def decode(self, tensor: QuantizedTensor, descale: Metadata, center: Metadata | None) -> F32:
        """Decode with the named metadata, whether or not it is paired with the codes."""
        assert tensor.snapshot is not None, "the simulator casts through snapshots only"
        spec = CastSpec(fmt=tensor.snapshot.fmt, policy=self.policy)
        add = None if center is None else center_over(center, tensor.shape[-1])
        return frozen(self.backend.decode(tensor.codes, descale.descale, add, spec))

    def gemm(self, name: str, left: F32, right: F32) -> F32:
        """The product of two operands: one of ``FORMS``."""
        if self.product is not None:
            return frozen(self.product(name, left, right))
        matmul = self.backend.matmul if self.reproducible else self.backend.xp.matmul
        return frozen(multiply(name, left, right, matmul=matmul))


def _check_recipe(recipe: Recipe) -> None:
    if recipe.block_recipe is not None:
        raise UsageError(
            f"recipe {recipe.name} with elements {recipe.block_recipe.name}: the simulator decodes by "
            "one scale a replica; leave elements out, or quantize_with_snapshot and decode_for_consumer yourself"
        )
    if recipe.observes_live_center:
        raise UsageError(
            f"recipe {recipe.name} with scale_source CURRENT and a centre of earlier tensors: no event "
            "observes about a live centre; use source CURRENT or scale_source DELAYED"
        )
