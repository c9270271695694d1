"""What a cell replays, and what that breaks: host, workload, schedule, verdict. Touches no tensor but to open them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from qsim._paths import sample_capture
from qsim.errors import CaseError, InputError, StudyError, UsageError
from qsim.formats import POLICIES, get_format
from qsim.quant import Recipe, Site, TensorRole, make_recipe
from qsim.record import Record
from qsim.sim import (
    FIXES,
    PRESETS,
    Body,
    Cadence,
    Case,
    Defect,
    Feature,
    Order,
    ScheduleSpec,
    Scores,
    Violation,
    broken,
    build_case,
    correct_twin,
    get_defect,
    high_precision_twin,
    in_order,
    lint,
    ruled,
)
from qsim.sim.notation import byhand
from qsim.sweep.cell import Cell, ScheduleParams, WorkloadParams
from qsim.workloads import WORKLOADS, Shaping, Workload

CORRECT, HIGH_PRECISION, WRITTEN = "correct", "high_precision", "written"
CONTROLS = (CORRECT, HIGH_PRECISION, WRITTEN)
"""What a cell can be beside a defect. Of a schedule.text, "written" is the text itself, the others are its twins."""
POLICY = POLICIES["ocp"]


class Side(Enum):
    """Which schedule of one that was written by hand: itself, or a twin over the same GEMMs."""

    OWN = "own"
    CORRECT = "correct"
    HIGH_PRECISION = "high precision"


class Host(msgspec.Struct, frozen=True):
    """What a trace of an unrewritten schedule depends on: everything in a cell but the defect."""

    fmt: str
    recipe: str
    window: int
    preset: str
    cadence: Cadence | None
    schedule: ScheduleParams
    workload: WorkloadParams
    seeds: tuple[int, ...]
    backend: str
    reproducible: bool
    side: Side = Side.OWN

    def correct(self) -> Host:
        """The host whose trace a defective one is measured against: itself where its preset breaks nothing on this
        schedule, else seed_correct with the same unit of a commit."""
        if self.schedule.text:
            return msgspec.structs.replace(self, side=Side.CORRECT)
        preset = PRESETS[self.preset]
        if not preset.breaks_on(spec_of(self.schedule).traits()):
            return self
        return msgspec.structs.replace(self, preset="seed_correct", cadence=self.cadence or preset.cadence)

    def high_precision(self) -> Host:
        """The control that casts nothing, so format, recipe, window and cadence do not matter."""
        plain = msgspec.structs.replace(
            self, preset="none", fmt="float8_e4m3fn", recipe="delayed", window=1, cadence=None
        )
        return msgspec.structs.replace(plain, side=Side.HIGH_PRECISION) if self.schedule.text else plain


def spec_of(params: ScheduleParams) -> ScheduleSpec:
    """The schedule that parameters name."""
    return ScheduleSpec(
        steps=params.steps,
        microbatches=params.microbatches,
        layers=params.layers,
        workers=params.workers,
        order=Order(params.order),
        stages=params.stages,
        features=frozenset(Feature(name) for name in params.features),
    )


def params_of(spec: ScheduleSpec) -> ScheduleParams:
    """The inverse of ``spec_of``."""
    return ScheduleParams(
        steps=spec.steps,
        microbatches=spec.microbatches,
        layers=spec.layers,
        workers=spec.workers,
        order=spec.order.value,
        stages=spec.stages,
        features=tuple(feature.value for feature in Feature if feature in spec.features),
    )


def host_of(cell: Cell, defect: Defect | None) -> Host:
    """The host of a cell, its schedule grown where the defect needs more; CaseError where it cannot grow."""
    schedule = cell.schedule
    if defect is not None:
        if schedule.text:
            raise CaseError(f"{defect.id} {defect.name} rewrites schedules that are built; this one is written by hand")
        try:
            schedule = params_of(defect.host(spec_of(schedule)))
        except UsageError as error:
            raise CaseError(f"{defect.id} {defect.name} needs more than fits: {error}") from error
    host = Host(
        fmt=cell.fmt,
        recipe=cell.recipe,
        window=cell.window,
        preset=cell.preset,
        cadence=None if defect is None else defect.cadence,
        schedule=schedule,
        workload=cell.workload,
        seeds=tuple(range(cell.seed, cell.seed + cell.replicas)),
        backend=cell.backend,
        reproducible=cell.reproducible,
    )
    if cell.defect == HIGH_PRECISION:
        return host.high_precision()
    return host.correct() if schedule.text and cell.defect == CORRECT else host


def defect_of(cell: Cell) -> Defect | None:
    """The defect of a cell, None for a control."""
    return None if cell.defect in CONTROLS else get_defect(cell.defect)


@lru_cache(maxsize=4)
def _workload(workload: WorkloadParams, seeds: tuple[int, ...], layers: int, microbatches: int) -> Workload:
    path = sample_capture() if workload.tensors == "builtin" else Path(workload.tensors)
    if workload.tensors_digest and path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != workload.tensors_digest:
            raise InputError(f"{path}: changed since the study was read; run the sweep again with another --out")
    shaping = Shaping(
        tokens=workload.tokens,
        outputs=workload.outputs,
        mean_shift=workload.mean_shift,
        layer_spread=workload.layer_spread,
        outlier_steps=workload.outlier_steps,
        outlier_factor=workload.outlier_factor,
    )
    open_workload = WORKLOADS[workload.kind]
    return open_workload(path, shaping=shaping, seeds=seeds, layers=layers, microbatches=microbatches)


def workload_of(host: Host) -> Workload:
    """The tensors of a host."""
    found = _workload(host.workload, host.seeds, host.schedule.layers, host.schedule.microbatches)
    if host.schedule.text:
        _check_loads(host.schedule.text, found.body)
    return found


def _check_loads(text: str, body: Body) -> None:
    """Raise StudyError where a text loads what no tensor of the workload is."""
    there: set[tuple[int, int]] = set()
    for node in body:
        if isinstance(node, Scores):
            there |= {(node.site, TensorRole.ATTN_Q), (node.site, TensorRole.ATTN_K)}
        else:
            there |= {(node.site, TensorRole.INPUT), (node.site, TensorRole.WEIGHT)}
            there |= {(node.site, TensorRole.GRAD_OUTPUT)} if node.gradients else set()

    def names(pairs: Iterable[tuple[int, int]]) -> str:
        sites, roles = set(map(int, Site)), set(map(int, TensorRole))
        return ", ".join(
            f"{Site(s).name.lower() if s in sites else f's{s}'}.{TensorRole(r).name.lower() if r in roles else f'r{r}'}"
            for s, r in sorted(pairs)
        )

    if lacking := byhand.loaded(text) - there:
        raise StudyError(f"schedule.text loads {names(lacking)}; the tensors of workload.tensors are {names(there)}")


class Plan(NamedTuple):
    """What no number decides: a schedule, what it does, what it breaks, what it is expected to break."""

    case: Case
    records: tuple[Record, ...]
    violations: tuple[Violation, ...]
    expected: frozenset[str]

    @property
    def broken(self) -> tuple[str, ...]:
        """The invariants that it breaks, by name."""
        return in_order(broken(self.violations))


@lru_cache(maxsize=64)
def _plan(
    schedule: ScheduleParams, side: Side, body: Body, preset: str, cadence: Cadence | None, recipe: Recipe, defect: str,
    fix: str,
) -> Plan:  # fmt: skip
    own = frozenset[str]()  # what it breaks by itself
    if schedule.text:
        read = byhand.written(schedule.text)
        case = Case(schedule=read.schedule, recipe=recipe, policy=POLICY, context=read.declared.context())
        match side:
            case Side.OWN:
                own = read.declared.breaks
            case Side.CORRECT:
                case = correct_twin(case)
            case Side.HIGH_PRECISION:
                case = high_precision_twin(case)
    else:
        case = build_case(
            spec_of(schedule), body=body, preset=PRESETS[preset], recipe=recipe, cadence=cadence, policy=POLICY
        )
        own = PRESETS[preset].breaks_on(case.context.traits)
    if defect:
        found = get_defect(defect)
        found.require(PRESETS[preset], recipe)
        case = found.apply(case)
    if fix:
        case = FIXES[fix].rewrite(case)
    records, violations = lint(case)
    if fix:
        return Plan(case, records, violations, _after(own, violations, defect, fix))
    return Plan(case, records, violations, own | (get_defect(defect).breaks if defect else frozenset()))


def _after(own: frozenset[str], violations: tuple[Violation, ...], defect: str, fix: str) -> frozenset[str]:
    """What is expected under a fix: a right one leaves nothing of the defect, at most what the preset breaks by
    itself; of a wrong one the catalogue knows that it leaves something, not what."""
    if not defect:
        return frozenset()
    found = get_defect(defect)
    if fix in found.fixes:
        return broken(violations) & own
    return broken(violations) if fix in found.wrong_fixes and violations else own | found.breaks


def plan_of(host: Host, *, defect: str = "", fix: str = "") -> Plan:
    """The plan of a host: shared by all formats and windows, which change no event."""
    stand_in = ruled(make_recipe(host.recipe, fmt=get_format("float8_e4m3fn")), PRESETS[host.preset])
    body = workload_of(host).body
    plan = _plan(host.schedule, host.side, body, host.preset, host.cadence, stand_in, defect, fix)
    return plan._replace(case=replace(plan.case, recipe=_recipe(host)))


def _recipe(host: Host) -> Recipe:
    return ruled(make_recipe(host.recipe, fmt=get_format(host.fmt), window=host.window), PRESETS[host.preset])


def plan_of_cell(cell: Cell, *, fix: str = "") -> Plan:
    """The plan of a cell. Raises CaseError where preset or recipe cannot host its defect."""
    defect = defect_of(cell)
    return plan_of(host_of(cell, defect), defect="" if defect is None else defect.id, fix=fix)


class Linted(NamedTuple):
    """One distinct schedule of a study: the first of its cells, its plan, or why there is none."""

    cell: Cell
    plan: Plan | None
    why: str


def lint_cells(cells: Iterable[Cell]) -> Iterator[Linted]:
    """Every distinct schedule of the cells, judged without replaying a tensor."""
    done: set[tuple[str, str, str, ScheduleParams]] = set()
    for cell in cells:
        key = cell.defect, cell.recipe, cell.preset, cell.schedule
        if key in done:
            continue
        done.add(key)
        try:
            yield Linted(cell, plan_of_cell(cell), "")
        except CaseError as error:
            yield Linted(cell, None, str(error))
