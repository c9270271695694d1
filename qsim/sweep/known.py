"""The names that studies may use, collected from the registries. The one place where they meet."""

from __future__ import annotations

from qsim.backends import BACKENDS
from qsim.formats import ALIASES, FORMATS
from qsim.quant import RECIPES
from qsim.sim import CONTRASTS, DEFECTS, FIXES, PRESETS, Feature, Order
from qsim.sweep.accumulation.schema import SWEPT
from qsim.sweep.allowed import Known
from qsim.sweep.plan import CONTROLS
from qsim.workloads import DATA, WORKLOADS

SCALE_ONLY = "float8_e8m0fnu"
"""A format of scales, not of tensors: it has no sign and no zero."""


def _variants() -> tuple[str, ...]:
    return tuple(f"{defect.id}/{one.name}" for defect in DEFECTS.values() for one in defect.variants)


def registries() -> Known:
    """Everything that a study can name."""
    tensors = {name: name for name in FORMATS if name != SCALE_ONLY}
    return Known(
        defects=(*CONTROLS, *DEFECTS, *CONTRASTS, *_variants()),
        formats=tensors | {alias: name for alias, name in ALIASES.items() if name in tensors},
        recipes=tuple(RECIPES),
        presets=tuple(PRESETS),
        backends=tuple(BACKENDS),  # "auto" is resolved before a cell is made: a case names what computed it
        orders=tuple(order.value for order in Order),
        features=tuple(feature.value for feature in Feature),
        workloads=tuple(WORKLOADS),
        models=SWEPT,
        data=tuple(DATA),
        fixes=tuple(FIXES),
    )
