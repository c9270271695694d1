"""From text to events: data, never executed. Collects every error of a text, one a line of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qsim.quant import OpId
from qsim.sim.events import Event
from qsim.sim.invariants import RULES
from qsim.sim.notation.model import Declared, NotationError, Written, Wrong
from qsim.sim.notation.signs import BY_LETTERS, Argument, Here, Sign
from qsim.sim.notation.split import Misplaced, Piece, parts, split, without_comment
from qsim.sim.notation.words import PHASES, fold_from, number, one_of, op_from
from qsim.sim.notation.write import HEADING
from qsim.sim.presets import Cadence
from qsim.sim.scopes import SCOPES

SHOWN = 20
"""Errors that are told of one text."""
MAX_RANKS = 2**16
_UNITS = {unit.value: unit for unit in Cadence}


class _Fault(Exception):  # noqa: N818 - ends one line, not the reading
    def __init__(self, column: int, because: str) -> None:
        super().__init__(because)
        self.column = column


def read_schedule(text: str) -> Written:
    """The events of a text, in order. Raises NotationError with every faulty line: place, what was found, what is
    allowed."""
    declared, events = Declared(), list[Event]()
    problems: list[str] = []
    for at, raw in enumerate(text.splitlines(), start=1):
        line = without_comment(raw)
        if not line.strip():
            continue
        try:
            if line.split()[0] == HEADING:
                if events or problems:
                    raise _Fault(1, f'"{HEADING}" must stand on the first line')
                declared = _declared(line)
            else:
                events += _events(line, declared)
        except (_Fault, Misplaced) as fault:
            problems.append(f"line {at}, column {fault.column}: {fault}")
    if not events and not problems:
        problems.append("line 1, column 1: found no event; write a line like: f t0 m0 L0.qkv.input: X P Q O C")
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise NotationError(problems[:SHOWN] + more)
    return Written(tuple(events), declared)


def _declared(line: str) -> Declared:
    found: dict[str, Any] = {}
    for piece in split(line, 1, " \t")[1:]:
        key, equals, value = piece.text.partition("=")
        try:
            match key:
                case "scope" if equals:
                    found[key] = one_of(SCOPES, value)
                case "unit" if equals:
                    found[key] = one_of(_UNITS, value)
                case "ranks" if equals:
                    found[key] = _ranks(value)
                case "fold" if equals:
                    found[key] = fold_from(value)
                case "breaks" if equals:
                    found[key] = frozenset(_rule(name) for name in parts(value, "+"))
                case _:
                    raise Wrong(f'found "{piece.text}"; allowed: scope=, unit=, ranks=, fold=, breaks=')
        except Wrong as wrong:
            raise _Fault(piece.column, str(wrong)) from wrong
    return Declared(**found)


def _ranks(text: str) -> int:
    count = number(text)
    if not 1 <= count <= MAX_RANKS:
        raise Wrong(f"found {count} ranks; allowed: 1 to {MAX_RANKS}")
    return count


def _rule(name: str) -> str:
    if name not in RULES:
        raise Wrong(f'found "{name}"; allowed: {", ".join(RULES)}')
    return name


def _events(line: str, declared: Declared) -> Iterator[Event]:
    """PHASE OP: SIGN SIGN | REF: SIGN ..."""
    first: Here | None = None
    for piece in split(line, 1, "|"):
        head, colon, rest = _headed(piece)
        column = piece.column + len(head) + 1
        if not colon:
            raise _Fault(piece.column, f'found "{_short(piece.text)}" without ":"; write PHASE OPERATION: SIGNS')
        here = _first(head, piece.column, declared) if first is None else _next(head, piece.column, first)
        first = first or here
        signs = split(rest, column, " \t")
        if not signs:
            raise _Fault(column, f"found no sign; allowed: {', '.join(BY_LETTERS)}")
        for sign in signs:
            yield _event(sign, here)


def _headed(piece: Piece) -> tuple[str, str, str]:
    """What stands before the first colon; a colon within brackets is no end of a head."""
    match = re.match(r"[^:(\[\"]*", piece.text)
    assert match is not None, "the pattern also fits nothing"
    head, rest = match[0], piece.text[match.end() :]
    return (head, ":", rest[1:]) if rest.startswith(":") else (head, "", rest)


def _first(head: str, column: int, declared: Declared) -> Here:
    words = split(head, column, " \t")
    if not words:
        raise _Fault(column, f'found no phase before ":"; allowed: {", ".join(PHASES)}')
    try:
        phase = one_of(PHASES, words[0].text)
    except Wrong as wrong:
        raise _Fault(words[0].column, f"{wrong} (phases)") from wrong
    return Here(phase, _op(words[1:], OpId(0), column), declared)


def _next(head: str, column: int, first: Here) -> Here:
    if not head.strip():
        raise _Fault(column, 'found no operation before ":"; write what differs from the first, like weight or m1')
    words = [Piece(part, column) for part in head.strip().split("/")]
    return first._replace(op=_op(words, first.op, column))


def _op(words: list[Piece], base: OpId, column: int) -> OpId:
    try:
        return op_from([word.text for word in words], base)
    except Wrong as wrong:
        at = next((word.column for word in words if f'"{word.text}"' in str(wrong)), column)
        raise _Fault(at, str(wrong)) from wrong


def _event(piece: Piece, here: Here) -> Event:
    letters, bracket, rest = piece.text.partition("(")
    sign = BY_LETTERS.get(letters)
    if sign is None:
        raise _Fault(piece.column, f'found "{_short(letters)}"; allowed signs: {", ".join(BY_LETTERS)}')
    inside = piece.column + len(letters) + 1
    if bracket and not rest.endswith(")"):
        raise _Fault(inside + rest.rfind(")") + 1, "found text right after a bracket; put a blank between signs")
    given = split(rest[:-1], inside, ",") if bracket and rest[:-1].strip() else []
    return sign.build(here.phase, here.op, _arguments(sign, given, here, piece.column))


def _arguments(sign: Sign, given: list[Piece], here: Here, column: int) -> dict[str, Any]:
    placed = [argument for argument in sign.arguments if not argument.key]
    keyed = {argument.key: argument for argument in sign.arguments if argument.key}
    texts: dict[str, Piece] = {}
    for piece in given:
        key, equals, value = piece.text.partition("=")
        if equals and key.strip() in keyed:
            name = keyed[key.strip()].name
            text = Piece(value.strip(), piece.column)
        elif not equals or not re.fullmatch(r"\w+ *", key):  # an equals sign within quotes or an operand
            following = [argument for argument in placed if argument.name not in texts]
            if not following:
                raise _Fault(piece.column, _surplus(sign, piece.text))
            name, text = following[0].name, piece
        else:
            raise _Fault(piece.column, _surplus(sign, piece.text))
        if name in texts:
            raise _Fault(piece.column, f'"{key.strip()}" is given a second time')
        texts[name] = text
    found: dict[str, Any] = {}
    for argument in sign.arguments:
        found[argument.name] = _value(sign, argument, texts.get(argument.name), here, found, column)
    return found


def _value(
    sign: Sign, argument: Argument, text: Piece | None, here: Here, before: dict[str, Any], column: int
) -> Any:  # fmt: skip
    if text is None:
        if argument.default is None:
            raise _Fault(column, f"{sign.letters} lacks {argument.name}: {argument.word.what}")
        return argument.default(here, before)
    try:
        return argument.word.read(text.text, here)
    except Wrong as wrong:
        raise _Fault(text.column, f"{wrong} ({argument.name} of {sign.letters}: {argument.word.what})") from wrong


def _surplus(sign: Sign, text: str) -> str:
    allowed = [f"{a.key}=" if a.key else a.name for a in sign.arguments]
    return f'found "{_short(text)}"; {sign.letters} takes {", ".join(allowed) or "no argument"}'


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
