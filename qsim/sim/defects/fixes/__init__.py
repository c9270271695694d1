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
from qsim.sim.defects.fixes.reads import (
    fifo_under_1f1b,
    forward_with_gradients,
    functional_state,
    keyed_stash,
    lifo_under_flush,
    own_descale_in_cache,
    paired_stash,
    refill_cache,
    same_context,
)
from qsim.sim.defects.fixes.state import (
    commit_every_unit,
    commit_of_own_unit,
    finite_rule,
    ignore_foreign,
    max_merge,
    observe_once,
    one_storage,
    rebuild_on_load,
    rollback,
    save_everything,
    skip_zero,
)
from qsim.sim.defects.fixes.workers import (
    atomic_commit,
    declared_group,
    decoded_everywhere,
    fail_closed_to_one_worker,
    own_buffers,
    same_collectives,
    wait_before_commit,
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
            Fix(name="functional_state", rewrite=functional_state,
                story="State in, state out: an operation observes and commits once, in forward; recompute gets what "
                "forward began with."),
            Fix(name="keyed_stash", rewrite=keyed_stash,
                story="Take out of a queue the entry of the operation that asks, whatever the order."),
            Fix(name="lifo_under_flush", rewrite=lifo_under_flush,
                story="Newest first where all forwards come before all backwards: the queue in the order of backward."),
            Fix(name="fifo_under_1f1b", rewrite=fifo_under_1f1b,
                story="Oldest first in a pipeline, where the first microbatch comes back first."),
            Fix(name="paired_stash", rewrite=paired_stash,
                story="One plan decides both sides: forward puts in exactly what recompute will take out."),
            Fix(name="own_descale_in_cache", rewrite=own_descale_in_cache,
                story="A weight cache holds the metadata of its codes beside them, and a hit decodes with those."),
            Fix(name="refill_cache", rewrite=refill_cache,
                story="Every step casts its weights into their caches, before anybody reads them."),
            Fix(name="forward_with_gradients", rewrite=forward_with_gradients,
                story="A checkpoint that does not detach: forward runs with gradients on, so what it casts is kept."),
            Fix(name="same_context", rewrite=same_context,
                story="Recompute enters the context that forward ran in; the caller says the phase, nobody guesses."),
            Fix(name="commit_every_unit", rewrite=commit_every_unit,
                story="Every owner that was observed in a unit commits at its end, whoever trains it."),
            Fix(name="commit_of_own_unit", rewrite=commit_of_own_unit,
                story="One commit a unit, after its last observation, of its own training observations."),
            Fix(name="ignore_foreign", rewrite=ignore_foreign,
                story="What was observed outside training is folded into nothing."),
            Fix(name="observe_once", rewrite=observe_once,
                story="Observe an operation once, however often it is cast; fold an observation in once."),
            Fix(name="max_merge", rewrite=max_merge,
                story="Amaxes of one unit merge by max: no sum, mean, clip, decay or last."),
            Fix(name="finite_rule", rewrite=finite_rule,
                story="Inf and NaN are counted and kept out of the window."),
            Fix(name="skip_zero", rewrite=skip_zero,
                story="A tensor without tokens says nothing about a scale."),
            Fix(name="one_storage", rewrite=one_storage,
                story="Write the storage that is read: no second copy of a state."),
            Fix(name="rebuild_on_load", rewrite=rebuild_on_load,
                story="Read the checkpoint first and whole, then make what follows from it: descales, cached casts."),
            Fix(name="save_everything", rewrite=save_everything,
                story="Every state that is ever advanced is in the checkpoint."),
            Fix(name="rollback", rewrite=rollback,
                story="A step that is run again starts from the states that it started from before."),
            Fix(name="atomic_commit", rewrite=atomic_commit,
                story="Read, merge and write a whole state in one step."),
            Fix(name="fail_closed_to_one_worker", rewrite=fail_closed_to_one_worker,
                story="Where workers share states, one works at a time; nothing interleaves."),
            Fix(name="own_buffers", rewrite=own_buffers,
                story="Every cast writes codes of its own; no scratch outlives its stream."),
            Fix(name="wait_before_commit", rewrite=wait_before_commit,
                story="Commit what the reduction brings, after it has ended."),
            Fix(name="declared_group", rewrite=declared_group,
                story="Reduce over the ranks that hold a replica, and over no others."),
            Fix(name="same_collectives", rewrite=same_collectives,
                story="Every rank runs the same reductions in the same order, whatever it computed."),
            Fix(name="decoded_everywhere", rewrite=decoded_everywhere,
                story="All ranks multiply what was decoded; the owner keeps the tensor for the optimizer alone."),
            Fix(name="single_snapshot", rewrite=one_snapshot,
                story="Wrong: one snapshot for the whole model keeps the wrong owner's value more reliably."),
        )
    }
)  # fmt: skip
