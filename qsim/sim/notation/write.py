"""From events to text. Knows no grammar but that of words and signs."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.quant import OpId
from qsim.sim.events import Event, Schedule
from qsim.sim.notation.model import Declared
from qsim.sim.notation.signs import BY_KIND, Here
from qsim.sim.notation.words import fold_text, head_of, ref_of
from qsim.sim.scopes import SCOPES

HEADING = "declare"
"""The first word of the line that declares."""


def op_of(event: Event) -> OpId | None:
    """The operation of an event, None where it has none."""
    field = BY_KIND[type(event)].op
    return getattr(event, field) if field else None


def arguments_of(event: Event, here: Here) -> tuple[str, ...]:
    """The arguments of an event as text, those left out that are as usual."""
    sign = BY_KIND[type(event)]
    values = sign.values(event)
    placed: list[str] = []
    keyed: list[str] = []
    told = 0
    for argument in sign.arguments:
        value = values[argument.name]
        usual = argument.default is not None and argument.default(here, values) == value
        if argument.key:
            keyed += [] if usual else [f"{argument.key}={argument.word.write(value, here)}"]
        else:
            placed.append(argument.word.write(value, here))
            told = told if usual else len(placed)
    return (*placed[:told], *keyed)


def sign_text(event: Event, here: Here) -> str:
    """One event: its letters, with arguments in brackets."""
    arguments = arguments_of(event, here)
    return BY_KIND[type(event)].letters + (f"({', '.join(arguments)})" if arguments else "")


def write_schedule(schedule: Schedule, declared: Declared) -> str:
    """A schedule as text: ``read_schedule`` gives the same tuple back. One line is one phase of one GEMM."""
    return "".join(f"{line}\n" for line in (_heading(declared), *_lines(schedule, declared)))


def _heading(declared: Declared) -> str:
    scope = next(name for name, known in SCOPES.items() if known == declared.scope)
    breaks = f" breaks={'+'.join(sorted(declared.breaks))}" if declared.breaks else ""
    return (
        f"{HEADING} scope={scope} unit={declared.unit.value} ranks={declared.ranks} fold={fold_text(declared.fold)}"
        f"{breaks}"
    )


def _lines(schedule: Schedule, declared: Declared) -> Iterator[str]:
    line = ""
    first: Here | None = None  # of the line
    op = OpId(0)  # at hand
    for event in schedule:
        mine = op_of(event)
        if first is None or event.phase is not first.phase or (mine is not None and not _together(mine, first.op)):
            if line:
                yield line
            op = mine or OpId(0)
            first = Here(event.phase, op, declared)
            line = f"{event.phase.value}{'' if mine is None else f' {head_of(op)}'}:"
        elif mine is not None and mine != op:
            line += f" | {ref_of(mine, first.op)}:"
            op = mine
        line += f" {sign_text(event, first._replace(op=op))}"
    if line:
        yield line


def _together(a: OpId, b: OpId) -> bool:
    """Operands of one GEMM."""
    return a._replace(role_id=0) == b._replace(role_id=0)
