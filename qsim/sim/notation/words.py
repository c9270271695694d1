"""Words of the notation: operations, cells, slots, folds, contexts. Each has a text and is read back from it.

A word is written where an operation is at hand: what it does not say, it takes from that operation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from qsim.quant import ANY, MergeRule, NonFiniteRule, OpId, Site, StateKey, TensorRole, ZeroRule
from qsim.sim.events import PLAIN, Fold, Mode, Phase
from qsim.sim.notation.model import Wrong

T = TypeVar("T")

NOTHING = "-"
"""No slot."""
_PLAIN = re.compile(r"[A-Za-z0-9_.*/!@~-]+")
_SITES = {site.name.lower(): int(site) for site in Site}
_ROLES = {role.name.lower(): int(role) for role in TensorRole}
_FIELDS = {"t": "logical_step", "m": "microbatch", "w": "worker_id", "v": "visit", "L": "layer_id"}
_SLOT = re.compile(r"(?P<kind>[A-Za-z][A-Za-z_.]*)/m(-?\d+)/w(-?\d+)/L(-?\d+)/s(-?\d+)/r(-?\d+)(?:/v(-?[1-9]\d*))?")
_KIND = re.compile(r"[A-Za-z][A-Za-z_.]*")


def quoted(text: str) -> str:
    """A name as it stands, or in quotes where it has other letters than names have."""
    odd = not _PLAIN.fullmatch(text) or text.startswith("~") or text == NOTHING
    return json.dumps(text) if odd else text


def unquoted(text: str) -> str:
    """The inverse of ``quoted``."""
    if text.startswith('"'):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise Wrong(f"{text}: these quotes do not end, or hold what JSON does not know") from error
        return str(value)
    if not _PLAIN.fullmatch(text):
        raise Wrong(f'"{text}" is no name; give letters, digits and _ . * / ! @ -, or a text in double quotes')
    return text


def one_of(names: Mapping[str, T], text: str) -> T:
    """The member with this name."""
    if text not in names:
        raise Wrong(f'found "{text}"; allowed: {", ".join(names)}')
    return names[text]


def number(text: str) -> int:
    """A whole number."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise Wrong(f'"{text}" is no whole number')
    return int(text)


def _site(value: int) -> str:
    return Site(value).name.lower() if value in _SITES.values() else f"s{value}"


def _role(value: int) -> str:
    return TensorRole(value).name.lower() if value in _ROLES.values() else f"r{value}"


def _known(names: Mapping[str, int], letter: str, text: str) -> int | None:
    if text in names:
        return names[text]
    return int(text[1:]) if re.fullmatch(rf"{letter}-?\d+", text) else None


def head_of(op: OpId) -> str:
    """An operation in full: ``t0 m1 L0.qkv.input``, worker and visit where they are not 0."""
    rest = "".join(f" {sign}{value}" for sign, value in (("w", op.worker_id), ("v", op.visit)) if value)
    return f"t{op.logical_step} m{op.microbatch}{rest} L{op.layer_id}.{_site(op.site)}.{_role(op.role_id)}"


def ref_of(op: OpId, base: OpId) -> str:
    """What tells ``op`` from ``base``: ``weight``, ``m0``, ``ffn_up.weight/m0/v1``; its role where nothing does."""
    parts = [
        sign + str(getattr(op, name)) for sign, name in _FIELDS.items() if getattr(op, name) != getattr(base, name)
    ]
    if op.site != base.site:
        parts.insert(0, f"{_site(op.site)}.{_role(op.role_id)}")
    elif op.role_id != base.role_id or not parts:
        parts.insert(0, _role(op.role_id))
    return "/".join(parts)


def op_from(parts: Iterable[str], base: OpId) -> OpId:
    """``base`` with the parts of a head or a reference in place of its own."""
    found: dict[str, int] = {}
    for part in parts:
        plain = part[:1] in _FIELDS and re.fullmatch(r"-?\d{1,18}", part[1:])
        new = {_FIELDS[part[0]]: int(part[1:])} if plain else _named(part)
        if twice := found.keys() & new.keys():
            raise Wrong(f'"{part}" gives {min(twice)} a second time')
        found |= new
    return base._replace(**found)


def _named(part: str) -> dict[str, int]:
    """``L0.qkv.input``, ``qkv.input``, ``qkv`` or ``input``."""
    new: dict[str, int] = {}
    words = part.split(".")
    if re.fullmatch(r"L-?\d{1,18}", words[0]):
        new["layer_id"] = int(words.pop(0)[1:])
    for word in words:
        site, role = _known(_SITES, "s", word), _known(_ROLES, "r", word)
        if site is not None and "site" not in new and "role_id" not in new:
            new["site"] = site
        elif role is not None and "role_id" not in new:
            new["role_id"] = role
        else:
            raise Wrong(
                f'found "{word}" in "{part}"; allowed: t0 m0 w0 v0 (step, microbatch, worker, visit), L0, a site '
                f"({', '.join(_SITES)}, s4 ...), a role ({', '.join(_ROLES)}, r5 ...), as in L0.qkv.input"
            )
    return new


def cell_text(cell: StateKey) -> str:
    """``L0.qkv.input``, ``L*.*.input/w1``, ``!1`` for another copy."""
    layer = "L*" if cell.layer_id == ANY else f"L{cell.layer_id}"
    site = "*" if cell.site == ANY else _site(cell.site)
    role = "*" if cell.role_id == ANY else _role(cell.role_id)
    worker = "" if cell.worker_id == ANY else f"/w{cell.worker_id}"
    return f"{layer}.{site}.{role}{worker}" + (f"!{cell.copy}" if cell.copy else "")


def cell_from(text: str) -> StateKey:
    """The inverse of ``cell_text``."""
    match = re.fullmatch(r"L(\*|-?\d+)\.([^./!]+)\.([^./!]+)(?:/w(-?\d+))?(?:!(-?\d+))?", text)
    site = None if match is None else ANY if match[2] == "*" else _known(_SITES, "s", match[2])
    role = None if match is None else ANY if match[3] == "*" else _known(_ROLES, "r", match[3])
    if match is None or site is None or role is None:
        raise Wrong(f'"{text}" is no owner; write L0.qkv.input, L*.*.* or L0.qkv.input/w1')
    layer = ANY if match[1] == "*" else int(match[1])
    return StateKey(layer, site, role, ANY if match[4] is None else int(match[4]), int(match[5] or 0))


def slot_name(kind: str, op: OpId) -> str:
    """The name that builders give to a value of ``op``; the step is no part of it."""
    visit = f"/v{op.visit}" if op.visit else ""
    return f"{kind}/m{op.microbatch}/w{op.worker_id}/L{op.layer_id}/s{op.site}/r{op.role_id}{visit}"


def slot_text(name: str, base: OpId) -> str:
    """``~snap`` for that of ``base``, ``~snap@weight/m0`` for another's, a name otherwise."""
    match = _SLOT.fullmatch(name)
    if match is None:
        return quoted(name)
    batch, worker, layer, site, role, visit = (int(value or 0) for value in match.groups()[1:])
    op = OpId(base.logical_step, batch, layer, site, role, worker, visit)
    if slot_name(match["kind"], op) != name:  # a number with a leading zero
        return quoted(name)
    return f"~{match['kind']}" + ("" if op == base else f"@{ref_of(op, base)}")


def slot_from(text: str, base: OpId) -> str:
    """The inverse of ``slot_text``."""
    if not text.startswith("~"):
        return unquoted(text)
    kind, at, ref = text[1:].partition("@")
    if not _KIND.fullmatch(kind):
        raise Wrong(f'"{text}" is no slot; write ~snap, ~codes.f@weight or a name of your own')
    return slot_name(kind, op_from(ref.split("/"), base) if at else base)


_MERGES = {rule.value: rule for rule in MergeRule}
_ZEROS = {rule.name.lower(): rule for rule in ZeroRule}
_NONFINITES = {rule.name.lower(): rule for rule in NonFiniteRule}


def fold_text(fold: Fold) -> str:
    """``max/skip/latch``: merge, zero and non-finite rule, with the amount of clip and decay."""
    amount = "" if fold.amount is None else f"/{float(fold.amount)!r}"
    return f"{fold.merge.value}/{fold.zero.name.lower()}/{fold.nonfinite.name.lower()}{amount}"


def fold_from(text: str) -> Fold:
    """The inverse of ``fold_text``."""
    words = text.split("/")
    if len(words) not in (3, 4):
        raise Wrong(f'"{text}" is no fold; write merge/zero/nonfinite, like max/skip/latch')
    amount = None
    if len(words) == 4:
        try:
            amount = float(words[3])
        except ValueError as error:
            raise Wrong(f'"{words[3]}" is no amount of a fold; write a number') from error
    return Fold(one_of(_MERGES, words[0]), one_of(_ZEROS, words[1]), one_of(_NONFINITES, words[2]), amount)


_FLAGS: Mapping[str, tuple[str, Any]] = {
    "off": ("enabled", False),
    "no_grad": ("grad", False),
    "eval": ("train", False),
    "cache": ("cache", True),
}
PHASES = {phase.value: phase for phase in Phase}


def mode_text(mode: Mode) -> str:
    """``off+fmt:float8_e5m2``; ``plain`` for a context without anything special."""
    parts = [word for word, (name, value) in _FLAGS.items() if getattr(mode, name) == value]
    parts += [f"fmt:{quoted(mode.fmt)}"] if mode.fmt else []
    parts += [f"group:{quoted(mode.group)}"] if mode.group else []
    parts += [f"bits:{mode.bits}"] if mode.bits else []
    parts += [f"as:{mode.detected.value}"] if mode.detected is not None else []
    return "+".join(parts) or "plain"


def mode_from(texts: Iterable[str]) -> Mode:
    """The inverse of ``mode_text``, its parts taken apart."""
    mode = PLAIN
    for text in texts:
        key, colon, value = text.partition(":")
        if text in _FLAGS:
            name, flag = _FLAGS[text]
            mode = mode._replace(**{name: flag})
        elif colon and key in ("fmt", "group"):
            new: dict[str, Any] = {key: unquoted(value)}
            mode = mode._replace(**new)
        elif colon and key == "bits":
            mode = mode._replace(bits=number(value))
        elif colon and key == "as":
            mode = mode._replace(detected=one_of(PHASES, value))
        elif text != "plain":
            raise Wrong(f'found "{text}"; allowed in mode: plain, {", ".join(_FLAGS)}, fmt:, group:, bits:, as:')
    return mode
