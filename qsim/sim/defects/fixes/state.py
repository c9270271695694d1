"""Repairs of what a commit folds in, by which rules, when, and of what a checkpoint holds. Knows no defect by name."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.quant import MergeRule, NonFiniteRule, OpId, StateKey, ZeroRule
from qsim.sim.case import Case
from qsim.sim.defects.edits import TRAINED, lives_of, with_cells, with_fold, writers_of
from qsim.sim.defects.model import rewritten
from qsim.sim.events import (
    Begin,
    Commit,
    Compute,
    Drop,
    Event,
    LoadState,
    Observe,
    Phase,
    Reduce,
    Restart,
    SaveState,
    Slot,
    Store,
    Wait,
)
from qsim.sim.invariants import unit_of
from qsim.sim.presets import Cadence
from qsim.sim.schedule import PASS

_Unit = tuple[StateKey, tuple[int, ...]]


def max_merge(case: Case) -> Case:
    """Observations of a unit merge by max, unclipped."""
    return with_fold(case, merge=MergeRule.MAX, amount=None)


def finite_rule(case: Case) -> Case:
    """Inf and NaN never enter a window: the largest finite magnitude counts."""
    return with_fold(case, nonfinite=NonFiniteRule.FINITE)


def skip_zero(case: Case) -> Case:
    """An amax of 0 never enters a window."""
    return with_fold(case, zero=ZeroRule.SKIP)


def one_storage(case: Case) -> Case:
    """Commits go to the storage that is read."""
    return with_cells(case, lambda cell: cell._replace(copy=0))


def ignore_foreign(case: Case) -> Case:
    """A commit folds in nothing that was observed outside training."""
    schedule: list[Event] = []
    for _, event, written in writers_of(case):
        if isinstance(event, Commit):
            kept = tuple(name for name in event.obs if _trains(written[name][1]))
            if not kept:
                continue
            event = event._replace(obs=kept)
        schedule.append(event)
    return rewritten(case, schedule)


_FOREIGN = (Phase.EVALUATE, Phase.CALIBRATE, Phase.CAPTURE, Phase.PADDING)


def _trains(seen: Observe | Wait) -> bool:
    return seen.phase in TRAINED if isinstance(seen, Observe) else seen.phase not in _FOREIGN


def commit_every_unit(case: Case) -> Case:
    """Every owner with a training observation in a unit, and without a commit in it, gets one at the unit's end."""
    added: dict[int, list[Event]] = {}
    for start, stop in lives_of(case):
        part = case.schedule[start:stop]
        made = {_unit_of(case, e.op) for e in part if isinstance(e, (Commit, Store)) and not e.cell.copy}
        for key, seen in _due(case, start, stop).items():
            if key not in made:
                where, commit = _commit_of(case, key[0], seen, start, stop)
                added.setdefault(where, []).append(commit)
    schedule: list[Event] = []
    for at, event in enumerate(case.schedule):
        schedule.append(event)
        schedule += added.get(at, [])
    return rewritten(case, schedule)


def commit_of_own_unit(case: Case) -> Case:
    """One commit a unit, after the last training observation of the unit, of these and no others."""
    own: set[int] = set()
    for start, stop in lives_of(case):
        due = {key: {seen.op for _, seen in found} for key, found in _due(case, start, stop).items()}
        commits = [(at, e, w) for at, e, w in _commits(case) if start <= at < stop]
        units = [_unit_of(case, e.op) for _, e, _ in commits]
        own |= {
            at
            for (at, _, writers), unit in zip(commits, units, strict=True)
            if writers == due.get(unit) and units.count(unit) == 1
        }
    kept: list[Event] = [e for at, e in enumerate(case.schedule) if not isinstance(e, Commit) or at in own]
    return commit_every_unit(rewritten(case, kept))


def _commits(case: Case) -> Iterator[tuple[int, Commit, set[OpId]]]:
    """Every commit, with the operations whose observations it folds in; foreign ones count as others."""
    for at, event, written in writers_of(case):
        if isinstance(event, Commit):
            writers = [written[name][1] for name in event.obs]
            yield at, event, {w.op if _trains(w) else w.op._replace(logical_step=-1) for w in writers}


def _unit_of(case: Case, op: OpId) -> _Unit:
    return case.context.scope(op), unit_of(op, case.context.unit)


def _due(case: Case, start: int, stop: int) -> dict[_Unit, list[tuple[int, Observe | Wait]]]:
    """The training observations of every owner and unit between two places; those of the group where ranks reduce."""
    group = {e.op: (at, e) for at, e in enumerate(case.schedule[start:stop], start) if isinstance(e, Wait)}
    found: dict[_Unit, list[tuple[int, Observe | Wait]]] = {}
    for at, event in enumerate(case.schedule[start:stop], start):
        if isinstance(event, Observe) and event.phase in TRAINED:
            found.setdefault(_unit_of(case, event.op), []).append(group.get(event.op, (at, event)))
    return found


def _commit_of(
    case: Case, cell: StateKey, seen: list[tuple[int, Observe | Wait]], start: int, stop: int
) -> tuple[int, Commit]:
    """The commit that is due, and the event that it follows: the last observation, or the end of the step."""
    last = seen[-1][1]
    where, phase = max(at for at, _ in seen), last.phase
    if case.context.unit is Cadence.STEP:
        step, phase = last.op.logical_step, Phase.UPDATE
        for at in range(start, stop):
            event = case.schedule[at]
            if isinstance(event, (Observe, Wait, Begin)) or hasattr(event, "gemm"):
                op: OpId = event.op  # type: ignore[union-attr]
                where = max(where, at) if op.logical_step == step and event.phase not in _FOREIGN else where
    return where, Commit(phase, last.op, cell, tuple(dict.fromkeys(w.into for _, w in seen)), case.context.fold)


def observe_once(case: Case) -> Case:
    """One observation for each begin of an operation, and no commit of observations that were all folded in before."""
    seen: set[OpId] = set()
    dropped: set[Slot] = set()
    rounds: set[tuple[OpId, str]] = set()  # reductions of what is no longer observed
    folded: set[tuple[StateKey, Slot]] = set()
    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Begin(op=op):
                seen.discard(op)
            case Observe(op=op, into=into):
                if op in seen:
                    dropped.add(into)
                    continue
                seen.add(op)
                dropped.discard(into)
                folded = {one for one in folded if one[1] != into}
            case Reduce(op=op, group=group, obs=obs) if obs in dropped:
                rounds.add((op, group.name))
                continue
            case Wait(op=op, group=group, into=into):
                if (op, group.name) in rounds:
                    dropped.add(into)
                    continue
                dropped.discard(into)
                folded = {one for one in folded if one[1] != into}
            case Commit(cell=cell, obs=obs):
                event = event._replace(obs=tuple(name for name in obs if name not in dropped))
                fresh = {(cell, name) for name in event.obs} - folded
                if not fresh:
                    continue
                folded |= fresh
            case _:
                pass
        schedule.append(event)
    return rewritten(case, schedule)


def rebuild_on_load(case: Case) -> Case:
    """A new process reads its checkpoint first, with every part of it; only then does it cast anything."""
    saved = next((e.into for e in case.schedule if isinstance(e, SaveState)), None)
    schedule: list[Event] = []
    early: list[Event] | None = None  # what a new process did before it has read its checkpoint
    for at, event in enumerate(case.schedule):
        if isinstance(event, LoadState):
            whole = LoadState(event.phase, event.source)
            schedule += [whole, *(early or [])]
            early = None
        elif isinstance(event, Restart) and saved is not None:
            schedule.append(event)
            if any(isinstance(e, LoadState) for e in case.schedule[at:]):
                early = []
            else:
                schedule.append(LoadState(event.phase, saved))
        else:
            (schedule if early is None else early).append(event)
    return rewritten(case, schedule)


def save_everything(case: Case) -> Case:
    """A checkpoint holds every state that is ever advanced."""
    cells = tuple(dict.fromkeys(e.cell for e in case.schedule if isinstance(e, (Begin, Commit)) and not e.cell.copy))
    schedule: list[Event] = [e._replace(cells=cells) if isinstance(e, SaveState) else e for e in case.schedule]
    return rewritten(case, schedule)


def _before_copies(schedule: list[Event]) -> int:
    """Where a checkpoint is read back: before a model is brought back from its copy."""
    at = len(schedule)
    while isinstance(event := schedule[at - 1], Drop) or (isinstance(event, Compute) and event.node == PASS):
        at -= 1
    return at


def rollback(case: Case) -> Case:
    """A step that is run again starts from the checkpoint that was written before it."""
    schedule: list[Event] = []
    saved: SaveState | None = None
    first: Event | None = None
    for at, event in enumerate(case.schedule):
        if isinstance(event, SaveState):
            saved, first = event, case.schedule[at + 1] if at + 1 < len(case.schedule) else None
        elif isinstance(event, (LoadState, Restart)):
            saved = None
        elif saved is not None and event == first and schedule[-1] is not saved:
            schedule.insert(_before_copies(schedule), LoadState(saved.phase, saved.into))
            saved = None
        schedule.append(event)
    return rewritten(case, schedule)
