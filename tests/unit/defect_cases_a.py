"""What the defects of timing and identity break and what mends them, and the smallest cases that host them."""

from __future__ import annotations

from dataclasses import replace

from qsim.sim import DEFECTS, Case
from tests.unit.sim_cases import WITH_GRADIENTS, case_of, recipe_of

CATALOGUE = {  # id, variant: what it breaks; facts of the project, written here a second time on purpose
    ("D13", ""): {"I1"},
    ("D14", ""): {"I1", "I9"},
    ("D15", ""): {"I9"},
    ("D16", ""): {"I9", "I13"},
    ("D17", ""): {"I2", "I10"},
    ("D17", "entered_twice"): {"I10"},
    ("D17", "newest_under_1f1b"): {"I2", "I10"},
    ("D18", ""): {"I10"},
    ("D18", "after_commit"): {"I2", "I10"},
    ("D19", ""): {"I10"},
    ("D20", ""): {"I3"},
    ("D21", ""): {"I13"},
    ("D21", "precision"): {"I13"},
    ("D39", ""): {"I2"},
    ("D40", ""): {"I13"},
    ("D40", "grad_mode"): {"I13"},
    ("D40", "call_stack"): {"I13"},
    ("D41", ""): {"I2", "I13"},
}
OLDER = {  # the article's, held here against the families alone
    ("D01", ""): {"I1"},
    ("D02", ""): {"I2", "I3", "I5"},
    ("D03", ""): {"I1", "I2", "I3", "I5"},
    ("D04", ""): {"I4"},
    ("D05", ""): {"I2", "I4"},
    ("D07", ""): {"I1", "I7"},
}
KEPT_SLOT = {"keyed_snapshot", "functional_state"}
FIXED_BY = {
    ("D13", ""): {"descale_in_the_data", *KEPT_SLOT},
    ("D14", ""): {"own_descale_in_cache", "descale_in_the_data", *KEPT_SLOT},
    ("D15", ""): {"refill_cache"},
    ("D16", ""): {"forward_with_gradients"},
    ("D17", ""): {"keyed_stash", "lifo_under_flush", *KEPT_SLOT},
    ("D17", "entered_twice"): {"keyed_stash", *KEPT_SLOT},
    ("D17", "newest_under_1f1b"): {"keyed_stash", "fifo_under_1f1b", *KEPT_SLOT},
    ("D18", ""): {"paired_stash", *KEPT_SLOT},
    ("D18", "after_commit"): {"paired_stash", *KEPT_SLOT},
    ("D19", ""): {"paired_stash", *KEPT_SLOT},
    ("D20", ""): {"functional_state", "merged_commit", "commit_of_own_unit", "observe_once"},
    ("D21", ""): {"same_context"},
    ("D21", "precision"): {"same_context"},
    ("D39", ""): KEPT_SLOT,
    ("D40", ""): {"same_context"},
    ("D40", "grad_mode"): {"same_context"},
    ("D40", "call_stack"): {"same_context"},
    ("D41", ""): {"same_context"},
}
SHAPES = list(CATALOGUE)


def host_of(shape: tuple[str, str], *, window: int = 1, recipe: str = "centred", fmt: str = "e4m3", **grown) -> Case:
    """The minimal schedule of a defect or variant, unrewritten; ``grown``: sizes that replace the minimal ones."""
    defect = DEFECTS[shape[0]].shaped(shape[1])
    spec = replace(defect.minimal, **grown)
    return case_of(recipe_of(recipe, fmt, window), spec=spec, cadence=defect.cadence, body=WITH_GRADIENTS)
