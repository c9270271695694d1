"""Tensor cores as data: how one instruction aligns, truncates and adds. Knows no arrays.

One block-FMA step consumes ``products`` products and one accumulator c (``block_fma`` is the definition):

1. A product is exact and not normalised: significand s_a s_b, exponent e_a + e_b, exponents clamped at the format's
   lowest binade.
2. E is the largest exponent of the non-zero products, and of c where it takes part and is not 0 (clamped at -126).
3. Every term is truncated toward zero to a multiple of 2^(E - fraction), and the integers are added exactly.
4. The sum is truncated toward zero to ``result`` fraction bits of its own binade (a float16 result: rounded to nearest
   even instead). A result of 0 is +0, of a sum that was not 0 too; beyond the range it is Inf. What is not finite is
   what IEEE gives; NaN is 7fffffff (7fff).

A longer K is a chain: c of the next step is this result. Sources: MMA-Sim (arXiv 2511.10909), hardware rows of
MATLAB-tensor-core (arXiv 2512.07004), PTX ISA.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from qsim.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

FP8: Final = ("float8_e4m3fn", "float8_e5m2")
F8F6F4: Final = (*FP8, "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
HALVES: Final = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCoreModel:
    """One kind of instruction.

    formats: of both operands (``mixed``: they may differ). products, fraction, result: n, F, R of the module.
    late: c is added after the products of an instruction of ``depth`` k, by one float32 addition to nearest even; the
    steps of an instruction then start from +0. order: residues of k modulo 4 that each step of an instruction takes, in
    turn; empty: ascending k. lowered: operands are converted to float16 first, so subnormals of narrower formats are
    normal. scale_format, scale_block: block scales along K, whose exponents join those of the products. group: products
    whose exact sum is one term of a step, its significand multiplied by those of the scales, its exponent theirs alone.
    half_result: a float16 result exists. integer: int8 operands, exact int32 sums modulo 2^32. evidence: what of it was
    held against hardware.
    """

    name: str
    formats: tuple[str, ...]
    products: int
    fraction: int
    result: int
    evidence: str
    depth: int = 0
    late: bool = False
    mixed: bool = True
    order: tuple[tuple[int, ...], ...] = ()
    lowered: bool = False
    scale_format: str | None = None
    scale_block: int = 0
    group: int = 0
    half_result: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        """Refuse what the kernels do not hold: they walk 4 terms at a time and keep sums below 2^53 units."""
        if self.integer:
            return
        terms = self.products // self.group if self.group else self.products
        rules = {
            "products must be a multiple of 4 (of 4 groups)": self.products > 0 and terms > 0 and terms % 4 == 0,
            "fraction must be in 1..40": 1 <= self.fraction <= 40,
            "result must be in 0..23": 0 <= self.result <= 23,
            "depth must be a multiple of products": self.depth >= 0 and self.depth % max(self.products, 1) == 0,
            "late needs a depth": not self.late or self.depth > 0,
            "group must divide products and scale_block": not self.group
            or (self.products % self.group == 0 and self.scale_block % self.group == 0 and self.scale_block > 0),
            "scale_format and scale_block come together": (self.scale_format is None) == (self.scale_block == 0),
            "scale_block must divide the step": not self.scale_block or self.step % self.scale_block == 0,
            "order must name residues of 4, one step each": not self.order
            or (sorted(r for step in self.order for r in step) == [0, 1, 2, 3] and self.step % 4 == 0
                and all(len(step) * self.step // 4 == self.products for step in self.order)),
        }  # fmt: skip
        for rule, holds in rules.items():
            if not holds:
                raise UsageError(f"model {self.name}: {rule}")

    @property
    def step(self) -> int:
        """k of one instruction, or of one step where no instruction is seen in the result: the unit of a chain."""
        return self.depth or self.products


_PUBLISHED = "published model (MMA-Sim); no hardware rows here"


def _hmma(name: str, products: int, fraction: int, formats: tuple[str, ...] = HALVES) -> tuple[TensorCoreModel, ...]:
    """The 16-bit instructions of a generation, and its TF32 of half as many products."""
    half = TensorCoreModel(
        name=f"{name}_hmma", formats=formats, products=products, fraction=fraction, result=23, mixed=False,
        half_result=True, evidence=_PUBLISHED,
    )  # fmt: skip
    if formats != HALVES:
        return (half,)
    tf32 = TensorCoreModel(
        name=f"{name}_tf32", formats=("tf32",), products=products // 2, fraction=fraction, result=23, mixed=False,
        evidence=_PUBLISHED,
    )  # fmt: skip
    return half, tf32


def _lowered(name: str, evidence: str) -> TensorCoreModel:
    return TensorCoreModel(
        name=name, formats=FP8, products=16, fraction=25, result=23, depth=32, late=True, order=((0, 1), (2, 3)),
        lowered=True, half_result=True, evidence=evidence,
    )  # fmt: skip


_ALL: Final = (
    TensorCoreModel(
        name="hopper_wgmma", formats=FP8, products=32, fraction=13, result=13, half_result=True,
        evidence="f32 rows of H200 and H100 (c = 0), 5,000 of 5,000",
    ),
    _lowered("hopper_mma_sync", "f16 rows of H200 (5,000 of 5,000), of H100 and B200, f32 rows of B200; SASS"),
    TensorCoreModel(
        name="ada_mma_sync", formats=FP8, products=16, fraction=13, result=13, half_result=True,
        evidence="f32 and f16 rows of Ada with c, 5,000 of 5,000 each",
    ),
    TensorCoreModel(
        name="blackwell_tcgen05", formats=F8F6F4, products=32, fraction=25, result=23, half_result=True,
        evidence=_PUBLISHED,
    ),
    _lowered("blackwell_mma_sync", "f16 and f32 rows of B200, as Hopper's"),
    TensorCoreModel(
        name="blackwell_mxf8f6f4", formats=F8F6F4, products=32, fraction=25, result=23, scale_format="float8_e8m0fnu",
        scale_block=32, evidence=_PUBLISHED,
    ),
    TensorCoreModel(
        name="blackwell_mxf4", formats=("float4_e2m1fn",), products=64, fraction=35, result=23,
        scale_format="float8_e8m0fnu", scale_block=32, group=16, evidence=_PUBLISHED,
    ),
    TensorCoreModel(
        name="blackwell_nvfp4", formats=("float4_e2m1fn",), products=64, fraction=35, result=23,
        scale_format="float8_e4m3fn", scale_block=16, group=16, evidence=_PUBLISHED,
    ),
    *_hmma("volta", 4, 23, ("float16",)),
    *_hmma("turing", 8, 24, ("float16",)),
    *_hmma("ampere", 8, 24),
    *_hmma("ada", 8, 24),
    *_hmma("hopper", 16, 25),
    *_hmma("blackwell", 16, 25),
    TensorCoreModel(
        name="int8", formats=("int8",), products=1, fraction=0, result=0, integer=True,
        evidence="PTX: exact int32 sums",
    ),
)  # fmt: skip

MODELS: Final[Mapping[str, TensorCoreModel]] = MappingProxyType({model.name: model for model in _ALL})
"""Every model by its name."""


def get_model(name: str | TensorCoreModel) -> TensorCoreModel:
    """The model of this name; a TensorCoreModel is returned as it is. Else UsageError."""
    if isinstance(name, TensorCoreModel):
        return name
    if isinstance(name, str) and name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(str(name), MODELS, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageError(f"unknown tensor-core model {name!r}: {hint}known: {', '.join(MODELS)}")
