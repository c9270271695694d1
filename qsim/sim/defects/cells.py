"""Identity defects of cells: a state under the wrong key, or in storage that nobody reads. Rewrites only."""

from __future__ import annotations

from qsim.quant import ANY, OpId, StateKey
from qsim.sim.case import Case
from qsim.sim.defects.edits import require_correct, unlike, with_cells
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.events import Commit, Event, Quantize, Store
from qsim.sim.schedule import Feature, ScheduleSpec


def commits_to_a_copy(case: Case) -> Case:
    """Commits go to storage that was replaced; whoever reads finds the other one."""
    require_correct(case)
    schedule: list[Event] = [
        e._replace(cell=e.cell._replace(copy=1)) if isinstance(e, (Commit, Store)) else e for e in case.schedule
    ]
    return unlike(case, rewritten(case, schedule), "commit")


def one_key_for_formats(case: Case) -> Case:
    """Sites that cast one role to several formats share its state: the key leaves the site out."""
    formats: dict[tuple[int, int], set[str]] = {}

    def role(op: OpId | StateKey) -> tuple[int, int]:
        return op.layer_id, op.role_id

    for event in case.schedule:
        if isinstance(event, Quantize):
            formats.setdefault(role(event.op), set()).add(event.mode.fmt)

    def cell(key: StateKey) -> StateKey:
        return key._replace(site=ANY) if len(formats.get(role(key), ())) > 1 else key

    return unlike(
        case,
        with_cells(case, cell),
        "role that is cast to two formats in one layer: it takes mixed_formats and two linear GEMMs a layer, "
        'as workload kind "seeded" has',
    )


DANGLING_STATE = Defect(
    id="D34",
    name="dangling_state",
    kind="identity",
    tier="S2",
    rewrite=commits_to_a_copy,
    breaks=frozenset({"I12"}),
    excludes=frozenset({Feature.SAVE_RESTORE.value}),  # a new process has one storage again, and loses commits instead
    fixes=("one_storage", "per_owner_state"),
    wrong_fixes=("commit_every_unit", "finite_rule"),
    story="The history was reallocated, and the quantizer still writes the old one. "
    "Epochs and amaxes look alive where they are written; what is read stays at its initial value.",
    anchors=("TransformerEngine 1985, 2044",),
)
RECIPE_KEY_COLLISION = Defect(
    id="D36",
    name="recipe_key_collision",
    kind="identity",
    tier="S1-S2",
    rewrite=one_key_for_formats,
    breaks=frozenset({"I4"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.MIXED_FORMATS})),
    needs=frozenset({Feature.MIXED_FORMATS.value, "two sites"}),
    fixes=("per_owner_state",),
    wrong_fixes=("keyed_snapshot", "merged_commit"),
    story="Two recipes of one layer are cached under one key, so two sites share a state that belongs to neither. "
    "Each encodes with a scale that the other one's amax and range have made.",
    anchors=("Primus 983", "PaddleFleet 1523"),
)
