"""The catalogue of defects and fixes. Each defect is one rewrite; ``step`` knows none of them."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qsim.errors import StudyError
from qsim.sim.defects.algebra import (
    COMMIT_CADENCE,
    LAST_MICROBATCH_WINS,
    NON_MAX_MERGE,
    NONFINITE_LATCH,
    ZERO_ROLL,
)
from qsim.sim.defects.cells import DANGLING_STATE, RECIPE_KEY_COLLISION
from qsim.sim.defects.concurrency import (
    CONCURRENT_DOUBLE_COMMIT,
    LATE_ASYNC_REDUCTION,
    LOST_UPDATE,
    SCRATCH_REUSE,
    TORN_READ,
)
from qsim.sim.defects.fixes import FIXES
from qsim.sim.defects.identity import (
    CACHE_UNFILLED_IN_NO_GRAD,
    CONTEXT_DRIFT,
    PHASE_BY_PROXY,
    STALE_WEIGHT_CACHE,
    STASH_GATE_MISMATCH,
    STASH_MISPAIRING,
)
from qsim.sim.defects.liveness import (
    FROZEN_BY_CAPTURE,
    REDUCTION_MEMBERSHIP,
    UPDATE_IN_WRONG_PLACE,
    UPDATE_NEVER_FIRES,
)
from qsim.sim.defects.model import Defect, Fix, Variant
from qsim.sim.defects.observation import DUAL_LAYOUT_DOUBLE_OBSERVE, FOREIGN_OBSERVATION
from qsim.sim.defects.persistence import RERUN_WITHOUT_ROLLBACK, RESTORE_SKEW
from qsim.sim.defects.reduction import REPLICA_DRIFT, WRONG_GROUP_REDUCTION
from qsim.sim.defects.scope import SHARED_ROLES, SHARED_SCOPE, SNAPSHOT_ON_SHARED_SCOPE
from qsim.sim.defects.timing import (
    CACHED_WEIGHT_MOVING_DESCALE,
    CONSUME_AFTER_ADVANCE,
    CONSUME_AND_RECOMPUTE_ADVANCE,
    DEFERRED_READ,
    EARLY_STOP_PARTIAL_REPLAY,
    FRESH_RANDOM_BITS,
    LIVE_READ_IN_BACKWARD,
    MULTI_REPLAY,
    RECOMPUTE_ADVANCES,
    STALE_CENTER,
    STALE_SCALE,
)

DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        defect.id: defect
        for defect in sorted(
            (
                CONSUME_AFTER_ADVANCE,
                RECOMPUTE_ADVANCES,
                CONSUME_AND_RECOMPUTE_ADVANCE,
                SHARED_SCOPE,
                SNAPSHOT_ON_SHARED_SCOPE,
                SHARED_ROLES,
                STALE_CENTER,
                TORN_READ,
                CONCURRENT_DOUBLE_COMMIT,
                LOST_UPDATE,
                LIVE_READ_IN_BACKWARD,
                CACHED_WEIGHT_MOVING_DESCALE,
                STALE_WEIGHT_CACHE,
                CACHE_UNFILLED_IN_NO_GRAD,
                STASH_MISPAIRING,
                STASH_GATE_MISMATCH,
                EARLY_STOP_PARTIAL_REPLAY,
                MULTI_REPLAY,
                CONTEXT_DRIFT,
                DEFERRED_READ,
                PHASE_BY_PROXY,
                FRESH_RANDOM_BITS,
                LATE_ASYNC_REDUCTION,
                SCRATCH_REUSE,
                UPDATE_NEVER_FIRES,
                UPDATE_IN_WRONG_PLACE,
                FOREIGN_OBSERVATION,
                LAST_MICROBATCH_WINS,
                NON_MAX_MERGE,
                COMMIT_CADENCE,
                ZERO_ROLL,
                NONFINITE_LATCH,
                WRONG_GROUP_REDUCTION,
                REDUCTION_MEMBERSHIP,
                REPLICA_DRIFT,
                RESTORE_SKEW,
                DANGLING_STATE,
                RERUN_WITHOUT_ROLLBACK,
                RECIPE_KEY_COLLISION,
                DUAL_LAYOUT_DOUBLE_OBSERVE,
                FROZEN_BY_CAPTURE,
            ),
            key=lambda one: one.id,
        )
    }
)
"""The catalogue, by id."""

CONTRASTS: Mapping[str, Defect] = MappingProxyType({STALE_SCALE.id: STALE_SCALE})
"""Rewrites that are no defect of the catalogue but put a figure beside one."""


def get_defect(name: str) -> Defect:
    """A defect or contrast by id ("D01") or name ("consume_after_advance"), or one of its variants ("D26/mean").

    StudyError for an unknown one.
    """
    known = {**DEFECTS, **CONTRASTS}
    for defect in known.values():
        if name in (defect.id, defect.name):
            return defect
        for one in defect.variants:
            if name in (f"{defect.id}/{one.name}", f"{defect.name}/{one.name}"):
                return replace(defect.shaped(one.name), id=f"{defect.id}/{one.name}")
    raise StudyError(f'defect "{name}" is unknown; known: {", ".join(known)}; see "qsim defects"')


__all__ = ["CONTRASTS", "DEFECTS", "FIXES", "Defect", "Fix", "Variant", "get_defect"]
