"""Repairs, right and wrong, by name. A fix knows no defect by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qsim.sim.defects.fixes.general import (
    compare_and_set,
    descale_in_the_data,
    keyed_snapshot,
    merged_commit,
    per_owner_state,
    per_worker_state,
)
from qsim.sim.defects.model import Fix
from qsim.sim.defects.scope import one_snapshot

FIXES: Mapping[str, Fix] = MappingProxyType(
    {
        fix.name: fix
        for fix in (
            Fix(name="descale_in_the_data", rewrite=descale_in_the_data,
                story="Carry scale, centre and epoch beside the codes; consumers read nothing else."),
            Fix(name="keyed_snapshot", rewrite=keyed_snapshot,
                story="Snapshot before any mutation, keyed by the operation; recompute reads it and is read-only."),
            Fix(name="per_owner_state", rewrite=per_owner_state,
                story="Independent state for every layer, site and role; then snapshots can be right."),
            Fix(name="merged_commit", rewrite=merged_commit,
                story="Merge the observations of a unit, commit once."),
            Fix(name="compare_and_set", rewrite=compare_and_set,
                story="Commit only on the epoch that was read, else read again."),
            Fix(name="per_worker_state", rewrite=per_worker_state,
                story="One scope deeper: a state for every layer and worker."),
            Fix(name="single_snapshot", rewrite=one_snapshot,
                story="Wrong: one snapshot for the whole model keeps the wrong owner's value more reliably."),
        )
    }
)  # fmt: skip
