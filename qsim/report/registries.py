"""What there is to choose from, as tables and as JSON: formats, policies, recipes, defects. Reads registries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qsim.codec.scaled import (
    SCALE_RECIPE_ALIASES,
    SCALE_RECIPES,
    Float32Scale,
    PowerOfTwoScale,
    ScaleRecipe,
    TwoLevelScale,
)
from qsim.formats import ALIASES, FORMATS, POLICIES, MissingNan, NanPolicy, Overflow, RoundMode
from qsim.gemm.models import MODELS
from qsim.quant import RECIPES
from qsim.quant.plain import CENTERS, NIBBLE_ORDERS
from qsim.sim import CONTRASTS, DEFECTS, FIXES, PRESETS, RULES, Defect, in_order

if TYPE_CHECKING:
    from rich.table import Table


def formats_data() -> dict[str, object]:
    """Formats with their numbers, cast policies, roundings and recipes."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name, []).append(alias)
    return {
        "formats": [
            {
                "name": fmt.name,
                "aliases": aliases.get(fmt.name, []),
                "exponent_bits": fmt.exponent_bits,
                "mantissa_bits": fmt.mantissa_bits,
                "bias": fmt.bias,
                "max": fmt.max,
                "smallest_positive": fmt.smallest_subnormal,
                "signed": fmt.signed,
                "has_zero": fmt.has_zero,
                "has_inf": fmt.has_inf,
                "nan": fmt.nan.value,
                "codes_per_byte": fmt.codes_per_byte,
            }
            for fmt in FORMATS.values()
        ],
        "policies": list(POLICIES),
        "roundings": [mode.value for mode in RoundMode],
        "overflows": [mode.value for mode in Overflow],
        "nan_policies": [mode.value for mode in NanPolicy],
        "missing_nan": [mode.value for mode in MissingNan],
        "scale_recipes": [
            {
                "name": r.name,
                "aliases": [alias for alias, name in SCALE_RECIPE_ALIASES.items() if name == r.name],
                "format": r.fmt.name,
                "block": list(r.block),
                "scale": _scale_name(r),
            }
            for r in SCALE_RECIPES.values()
        ],
        "tensor_core_models": [
            {
                "name": m.name,
                "formats": list(m.formats),
                "products": m.products,
                "fraction": m.fraction,
                "result": m.result,
                "late": m.late,
                "scale_format": m.scale_format,
                "scale_block": m.scale_block,
                "evidence": m.evidence,
            }
            for m in MODELS.values()
        ],
        "nibble_orders": NIBBLE_ORDERS,
        "centers": list(CENTERS),
        "recipes": list(RECIPES),
        "presets": [{"name": p.name, "story": p.story} for p in PRESETS.values()],
    }


def _scale_name(recipe: ScaleRecipe) -> str:
    """The scale rule in a few words."""
    match recipe.scale:
        case PowerOfTwoScale(rule=rule):
            return f"E8M0, {rule.value}"
        case TwoLevelScale(order=order, scale_max=scale_max, error=error):
            words = f"E4M3 up to {scale_max} x float32 amax, {order.value}"
            return words if error is None else f"{words}, {error.value} error"
        case Float32Scale():
            return "float32, max / amax"


def _scale_rows() -> list[list[str]]:
    """The scale recipes, one line a family: those whose names differ in their ends alone."""
    families: dict[tuple[str, str], list[ScaleRecipe]] = {}
    for recipe in SCALE_RECIPES.values():
        stem = recipe.fmt.name if isinstance(recipe.scale, Float32Scale) else recipe.name.rpartition("_")[0]
        own = isinstance(recipe.scale, TwoLevelScale)
        families.setdefault((recipe.name if own else stem, recipe.fmt.name), []).append(recipe)
    rows = []
    for (_, fmt), members in families.items():
        names = " ".join(m.name for m in members)
        blocks = sorted({tuple(m.block) for m in members})
        block = "x".join(map(str, blocks[0])) if len(blocks) == 1 else "whole, row, column, 1x128, 128x128"
        scales = {_scale_name(m) for m in members}
        rows.append([names, fmt, block, scales.pop() if len(scales) == 1 else "E8M0, by the rule named"])
    return rows


def defects_data() -> list[dict[str, object]]:
    """The catalogue and its contrasts."""
    return [_defect_data(defect) for defect in (*DEFECTS.values(), *CONTRASTS.values())]


def _defect_data(defect: Defect) -> dict[str, object]:
    return {
        "id": defect.id,
        "name": defect.name,
        "kind": defect.kind,
        "tier": defect.tier,
        "breaks": list(in_order(defect.breaks)),
        "fixes": list(defect.fixes),
        "wrong_fixes": list(defect.wrong_fixes),
        "needs": {
            "layers": defect.minimal.layers,
            "microbatches": defect.minimal.microbatches,
            "workers": defect.minimal.workers,
            "cadence": None if defect.cadence is None else defect.cadence.value,
            "centred_recipe": defect.centred,
        },
        "variants": {one.name: list(in_order(one.breaks)) for one in defect.variants},
        "story": defect.story,
        "anchors": list(defect.anchors),
    }


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, box=None, padding=(0, 1))
    for column in columns:
        whole = column in ("id", "name", "kind", "breaks")
        # a name is not cut in two: it must be there whole to be copied
        words = [w for row in rows if column.endswith("fixed by") for w in str(row[columns.index(column)]).split()]
        table.add_column(column, overflow="fold", no_wrap=whole, min_width=max(map(len, words), default=0))
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table


def formats_tables() -> list[Table]:
    """formats_data for a reader."""
    data = formats_data()
    listed: Sequence[Mapping[str, object]] = data["formats"]  # type: ignore[assignment]
    columns = ("name", "aliases", "E", "M", "bias", "max", "min positive", "signed", "zero", "inf", "nan", "codes/byte")
    rows = [
        [", ".join(v) if isinstance(v, list) else f"{v:.6g}" if isinstance(v, float) else v for v in f.values()]
        for f in listed
    ]
    names = [
        ["stateful recipes", ", ".join(RECIPES)],
        ["centres", ", ".join(CENTERS)],
        ["nibble orders", ", ".join(NIBBLE_ORDERS)],
        ["tensor-core models", ", ".join(MODELS)],
        ["cast policies", ", ".join(POLICIES)],
        ["roundings", ", ".join(mode.value for mode in RoundMode)],
        ["overflow rules", ", ".join(mode.value for mode in Overflow)],
        ["NaN rules", ", ".join(mode.value for mode in NanPolicy)],
        ["rules for a missing NaN", ", ".join(mode.value for mode in MissingNan)],
        ["presets", ", ".join(PRESETS)],
    ]
    return [
        _table("Formats", columns, rows),
        _table("Scale recipes (qsim.quantize)", ("names", "elements", "block", "scale"), _scale_rows()),
        _table("Other names", ("kind", "names"), names),
    ]


def defects_tables() -> list[Table]:
    """defects_data for a reader, with the invariants and the fixes."""
    rows = [
        [d.id, d.name, d.kind, d.tier, " ".join(in_order(d.breaks)), ", ".join(d.fixes), ", ".join(d.wrong_fixes)]
        for d in (*DEFECTS.values(), *CONTRASTS.values())
    ]
    columns = ("id", "name", "kind", "tier", "breaks", "fixed by", "not fixed by")
    variants = [[f"{d.id}/{one.name}", " ".join(in_order(one.breaks))] for d in DEFECTS.values() for one in d.variants]
    return [
        _table("Defects", columns, rows),
        _table("Variants", ("id", "breaks"), variants),
        _table("Stories", ("id", "story"), [[d.id, d.story] for d in (*DEFECTS.values(), *CONTRASTS.values())]),
        _table("Invariants", ("id", "name", "meaning"), [[r.id, r.name, r.meaning] for r in RULES.values()]),
        _table("Fixes", ("name", "story"), [[f.name, f.story] for f in FIXES.values()]),
    ]
