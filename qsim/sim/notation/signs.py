"""The signs of the notation: for each event its letters and its arguments, with what each is where it is not said.

Reads and writes no line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from qsim.quant import OpId, StateKey, TensorRole
from qsim.sim.events import (
    METADATA_FIELDS,
    PLAIN,
    Allocate,
    Begin,
    Commit,
    Compute,
    Consume,
    Content,
    Drop,
    Event,
    Fetch,
    Group,
    Load,
    LoadState,
    Observe,
    Operand,
    Optimize,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restart,
    Restore,
    SaveState,
    Stash,
    Store,
    Take,
    Wait,
)
from qsim.sim.notation.model import Declared, Wrong
from qsim.sim.notation.split import parts
from qsim.sim.notation.words import (
    NOTHING,
    cell_from,
    cell_text,
    fold_from,
    fold_text,
    mode_from,
    mode_text,
    number,
    one_of,
    op_from,
    quoted,
    ref_of,
    slot_from,
    slot_name,
    slot_text,
    unquoted,
)
from qsim.sim.schedule import queue_of

T = TypeVar("T")


class Here(NamedTuple):
    """Where a sign stands: its phase, its operation, what the text declares."""

    phase: Phase
    op: OpId
    declared: Declared

    @property
    def cell(self) -> StateKey:
        """The declared owner."""
        return self.declared.scope(self.op)

    def own(self, kind: str) -> str:
        """The operation's own slot of a kind."""
        return slot_name(kind, self.op)

    def cached(self, kind: str) -> str:
        """The slot of a weight cache: one for all microbatches."""
        return slot_name(kind, self.op._replace(microbatch=0, visit=0))


class Word(NamedTuple):
    """How a value is written and read. what: what to write, for an error."""

    write: Callable[[Any, Here], str]
    read: Callable[[str, Here], Any]
    what: str


class Argument(NamedTuple):
    """One argument of a sign. key: what stands before "=", "" for one that is told by its place, before the others.

    default: what it is where it is not written, from the place and the arguments before it; None where it must be.
    """

    name: str
    key: str
    word: Word
    default: Callable[[Here, Mapping[str, Any]], Any] | None


class Sign(NamedTuple):
    """One event. op: the field that holds its operation, "" where it has none. values, build: the event taken apart
    into its arguments, and put together again.
    """

    letters: str
    kind: type[Event]
    op: str
    arguments: tuple[Argument, ...]
    meaning: str
    values: Callable[[Any], Mapping[str, Any]]
    build: Callable[..., Event]


def _list(word: Word) -> Word:
    return Word(
        lambda values, here: "+".join(word.write(value, here) for value in values) or NOTHING,
        lambda text, here: () if text == NOTHING else tuple(word.read(part, here) for part in parts(text, "+")),
        f"{word.what}, several with + between them, - for none",
    )


def _enum(members: Mapping[str, Any], what: str) -> Word:
    names = {member: name for name, member in members.items()}
    return Word(lambda value, here: names[value], lambda text, here: one_of(members, text), what)


SLOT = Word(
    lambda name, here: slot_text(name, here.op), lambda text, here: slot_from(text, here.op), "a slot, like ~snap"
)
MAYBE_SLOT = Word(
    lambda name, here: NOTHING if name is None else slot_text(name, here.op),
    lambda text, here: None if text == NOTHING else slot_from(text, here.op),
    "a slot, like ~snap, or -",
)
CELL = Word(lambda cell, here: cell_text(cell), lambda text, here: cell_from(text), "an owner, like L0.qkv.input")
NAME = Word(lambda name, here: quoted(name), lambda text, here: unquoted(text), "a name")
FOLD = Word(lambda fold, here: fold_text(fold), lambda text, here: fold_from(text), "a fold, like max/skip/latch")
MODE = Word(
    lambda mode, here: mode_text(mode), lambda text, here: mode_from(parts(text, "+")), "a context, like off+no_grad"
)
CONTENT = _enum({content.value or "normal": content for content in Content}, "what a tensor holds")
PART = _enum({part.value: part for part in Part}, "what is written")
TAKE = _enum({take.name.lower(): take for take in Take}, "which entry is taken")


def _group_from(text: str, here: Here) -> Group:
    name, colon, size = text.rpartition(":")
    if not colon:
        raise Wrong(f'"{text}" is no group; write its name and how many ranks take part, like g:2')
    return Group(unquoted(name), number(size))


GROUP = Word(lambda group, here: f"{quoted(group.name)}:{group.size}", _group_from, "a group, like g:2")


def _usual(here: Here, of: OpId, cached: bool) -> Operand:
    """The operand that a reference alone stands for: codes of this phase, decoded with the operation's snapshot."""
    at = here._replace(op=of)
    codes = at.cached("cache") if cached else at.own(f"codes.{here.phase.value}")
    by = at.cached("cache.snap") if cached else at.own("snap")
    return Operand(of, codes, by, None, by, cached)


def _raw(of: OpId) -> Operand:
    return Operand(of, slot_name("x", of), None, None, None)


def _operand_text(operand: Operand, here: Here) -> str:
    ref = ref_of(operand.of, here.op)
    if operand == _raw(operand.of):
        return f"{ref}[raw]"
    usual, at = _usual(here, operand.of, operand.cached), here._replace(op=operand.of)
    said = ["cached"] if operand.cached else []
    if operand.codes != usual.codes:
        said.append(f"codes={SLOT.write(operand.codes, at)}")
    if operand.descale != operand.version:
        said += [f"{name}={MAYBE_SLOT.write(getattr(operand, name), at)}" for name in ("descale", "version")]
    elif operand.descale != usual.descale:
        said.append(f"by={MAYBE_SLOT.write(operand.descale, at)}")
    if operand.center is not None:
        paired = operand.center == operand.descale
        said.append("center" if paired else f"center={SLOT.write(operand.center, at)}")
    return f"{ref}[{' '.join(said)}]" if said else ref


def _operand_from(text: str, here: Here) -> Operand:
    ref, bracket, rest = text.partition("[")
    of = op_from(ref.strip().split("/"), here.op)
    said = parts(rest.removesuffix("]"), " ") if bracket else []
    if said == ["raw"]:
        return _raw(of)
    operand, at = _usual(here, of, "cached" in said), here._replace(op=of)
    paired = False
    for word in said:
        key, equals, value = word.partition("=")
        if word == "center":
            paired = True
        elif equals and key == "by":
            by = MAYBE_SLOT.read(value, at)
            operand = operand._replace(descale=by, version=by)
        elif equals and key in (*METADATA_FIELDS, "codes"):
            operand = operand._replace(**{key: (SLOT if key == "codes" else MAYBE_SLOT).read(value, at)})
        elif word != "cached":
            raise Wrong(
                f'found "{word}"; allowed in an operand: raw alone, cached, center, codes=, by=, descale=, center=, '
                "version="
            )
    return operand._replace(center=operand.descale) if paired else operand


OPERAND = Word(_operand_text, _operand_from, "an operand, like weight or weight[by=~live]")
_LEFT, _RIGHT = "left", "right"
_PAIRS = {
    "linear": (TensorRole.INPUT, TensorRole.WEIGHT),
    "scores": (TensorRole.ATTN_Q, TensorRole.ATTN_K),
    "dgrad": (TensorRole.GRAD_OUTPUT, TensorRole.WEIGHT),
    "wgrad": (TensorRole.INPUT, TensorRole.GRAD_OUTPUT),
}


def _side(side: int) -> Callable[[Here, Mapping[str, Any]], Operand]:
    def default(here: Here, before: Mapping[str, Any]) -> Operand:
        """The roles of the GEMM; backward reads what recompute made, and its own gradient."""
        role = _PAIRS.get(before["gemm"], _PAIRS["linear"])[side]
        usual = _usual(here, here.op._replace(role_id=int(role)), False)
        if before["gemm"] in ("dgrad", "wgrad") and role is not TensorRole.GRAD_OUTPUT:
            return usual._replace(codes=slot_name("codes.r", usual.of))
        return usual

    return default


def _own(kind: str) -> Callable[[Here, Mapping[str, Any]], str]:
    return lambda here, before: here.own(kind)


def _of_phase(kind: str) -> Callable[[Here, Mapping[str, Any]], str]:
    return lambda here, before: here.own(f"{kind}.{here.phase.value}")


def _always(value: T) -> Callable[[Here, Mapping[str, Any]], T]:
    return lambda here, before: value


def _cell(here: Here, before: Mapping[str, Any]) -> StateKey:
    return here.cell


def _seen(here: Here, before: Mapping[str, Any]) -> tuple[str, ...]:
    return (here.own(f"obs.{here.phase.value}"),)


_OWNER = Argument("cell", "cell", CELL, _cell)
_FOLD = Argument("fold", "fold", FOLD, lambda here, before: here.declared.fold)
_OBS = Argument("obs", "obs", _list(SLOT), _seen)
_QUEUE = Argument("queue", "queue", NAME, lambda here, before: queue_of(here.cell))


def _sign(letters: str, kind: Any, meaning: str, *arguments: Argument, op: str = "op") -> Sign:
    names = tuple(argument.name for argument in arguments)
    first = ("phase", op) if op else ("phase",)

    def build(phase: Phase, of: OpId, found: Mapping[str, Any]) -> Event:
        made: Event = kind(**dict(zip(first, (phase, of), strict=False)), **found)
        return made

    return Sign(letters, kind, op, arguments, meaning, lambda e: {name: getattr(e, name) for name in names}, build)


def _consume(phase: Phase, op: OpId, found: Mapping[str, Any]) -> Consume:
    return Consume(phase, op, found["gemm"], (found[_LEFT], found[_RIGHT]), found["out"])


_CONSUME = Sign(
    "U",
    Consume,
    "op",
    (
        Argument("gemm", "", NAME, _always("linear")),
        Argument(_LEFT, "", OPERAND, _side(0)),
        Argument(_RIGHT, "", OPERAND, _side(1)),
        Argument("out", "out", SLOT, lambda here, before: here.own(f"out.{here.phase.value}.{before['gemm']}")),
    ),
    "a GEMM decodes both operands and multiplies",
    lambda e: {"gemm": e.gemm, _LEFT: e.operands[0], _RIGHT: e.operands[1], "out": e.out},
    _consume,
)

SIGNS: tuple[Sign, ...] = (
    _sign("X", Load, "bring a tensor in",
          Argument("content", "", CONTENT, _always(Content.NORMAL)),
          Argument("out", "out", SLOT, _own("x")), op="key"),
    _sign("P", Begin, "freeze the state into a snapshot", _OWNER,
          Argument("into", "into", SLOT, _own("snap")),
          Argument("obs", "obs", MAYBE_SLOT, _always(None))),
    _sign("Q", Quantize, "encode with a snapshot",
          Argument("src", "src", SLOT, _own("x")),
          Argument("by", "by", SLOT, _own("snap")),
          Argument("out", "out", SLOT, _of_phase("codes")),
          Argument("mode", "mode", MODE, _always(PLAIN))),
    _sign("O", Observe, "look at a tensor for a future state",
          Argument("src", "src", SLOT, _own("x")),
          Argument("by", "by", MAYBE_SLOT, _own("snap")),
          Argument("into", "into", SLOT, _of_phase("obs"))),
    _sign("C", Commit, "fold observations in: the epoch moves on by one", _OWNER, _OBS, _FOLD),
    _CONSUME,
    _sign("F", Fetch, "read the live state as it is now", _OWNER, Argument("into", "into", SLOT, _own("live"))),
    _sign("S", Store, "write the successor of a state that was fetched", _OWNER,
          Argument("base", "base", SLOT, _own("live")), _OBS, _FOLD,
          Argument("part", "part", PART, _always(Part.ALL))),
    _sign("K", Stash, "keep: put a value into a queue", _QUEUE, Argument("slot", "slot", SLOT, _own("snap"))),
    _sign("V", Restore, "take an entry of a queue out",
          Argument("take", "", TAKE, _always(Take.FIFO)), _QUEUE,
          Argument("into", "into", SLOT, _own("snap.r")), _OWNER),
    _sign("R", Reduce, "hand an observation to a group of ranks",
          Argument("group", "", GROUP, None), Argument("obs", "obs", SLOT, _of_phase("obs"))),
    _sign("A", Wait, "await what the group has merged",
          Argument("group", "", GROUP, None), Argument("into", "into", SLOT, _own("obs.group"))),
    _sign("OPT", Optimize, "the optimizer moves the weights to their next version"),
    _sign("SV", SaveState, "save states and queues",
          Argument("cells", "", _list(CELL), None), Argument("into", "into", SLOT, _always("checkpoint")), op=""),
    _sign("RS", Restart, "the process ends, another begins",
          Argument("keep", "", _list(SLOT), _always(("checkpoint",))), op=""),
    _sign("LD", LoadState, "read a checkpoint back",
          Argument("source", "", SLOT, _always("checkpoint")),
          Argument("parts", "parts", _list(NAME), _always(("state", "descale", "weights", "queues"))), op=""),
    _sign("AL", Allocate, "reserve buffers of codes that nothing was written to",
          Argument("slots", "", _list(SLOT), None), op="like"),
    _sign("N", Compute, "apply a node of the layer to values",
          Argument("node", "", NAME, None),
          Argument("ins", "ins", _list(SLOT), _always(())),
          Argument("outs", "outs", _list(SLOT), _always(())), op="at"),
    _sign("D", Drop, "free slots", Argument("slots", "", _list(SLOT), None), op=""),
)  # fmt: skip
"""W, a cast into a weight cache, is Q with other slots; H, a hit, is an operand that is ``cached``."""

BY_KIND: Mapping[type, Sign] = MappingProxyType({sign.kind: sign for sign in SIGNS})
BY_LETTERS: Mapping[str, Sign] = MappingProxyType({sign.letters: sign for sign in SIGNS})
