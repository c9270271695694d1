"""Records in the signs of docs/lifecycle.md: P@k Q@k O C U@k, and who runs them. Judges nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from qsim.explore.runs import interleaved
from qsim.explore.space import Space
from qsim.explore.threads import threads
from qsim.quant import OpId, StateKey
from qsim.record import Op, Record
from qsim.sim import records_of

SIGNS: Mapping[str, str] = MappingProxyType(
    {
        "begin": "P",
        "quantize": "Q",
        "observe": "O",
        "commit": "C",
        "consume": "U",
        "fetch": "F",
        "store": "S",
        "reduce": "R",
        "wait": "W",
    }
)
"""By kind of record; a kind that is not here is written as it is called."""

QUIET = frozenset({"load", "drop"})
"""Kinds that the notation leaves out: they read and write no state."""


def sign(record: Record) -> str:
    """One event, as "Q@3": with the epoch that was used, with several ("U@0,1") where a decode mixes them."""
    epochs: list[int] = []
    if record.kind in ("begin", "quantize", "fetch") and record.used is not None:
        epochs = [record.used.epoch]
    for operand in record.operands:
        epochs += [v.epoch for v in (operand.descale, operand.center, operand.version) if v is not None]
    at = ",".join(map(str, dict.fromkeys(epochs)))
    part = "" if record.part == "all" else f".{record.part}"
    return SIGNS.get(record.kind, record.kind) + part + (f"@{at}" if at else "")


def label(op: Op) -> str:
    """What an operation casts, without step and worker: "L0/qkv/input"."""
    mine = OpId(*op)
    return str(StateKey(mine.layer_id, mine.site, mine.role_id))


def sentence(records: Sequence[Record]) -> str:
    """The records of one worker: "f: P@0 Q@0 O C U@0; r: Q@0 U@0", with steps and owners where there are several."""
    loud = [r for r in records if r.kind not in QUIET and r.op is not None]
    steps, labels = {r.op[0] for r in loud if r.op}, {label(r.op) for r in loud if r.op}

    def place(record: Record) -> tuple[str, str]:
        assert record.op is not None, "left out above"
        step = f"step {record.op[0]} " if len(steps) > 1 else ""
        return step + record.phase, label(record.op) if len(labels) > 1 else ""

    parts = []
    for phase, group in itertools.groupby(loud, key=lambda r: place(r)[0]):
        owners = [
            " ".join(filter(None, (owner, *map(sign, mine))))
            for owner, mine in itertools.groupby(group, key=lambda r: place(r)[1])
        ]
        parts.append(f"{phase}: {', '.join(owners)}")
    return "; ".join(parts)


def programs(space: Space) -> Iterator[tuple[tuple[int, ...], str]]:
    """What each worker does, with the epochs that it sees when it runs alone; workers that do the same together."""
    alike: dict[str, list[int]] = {}
    for thread in threads(space):
        alone = records_of(replace(interleaved(space, ()), schedule=thread.events))
        alike.setdefault(sentence(alone), []).append(thread.worker)
    for text, workers in alike.items():
        yield tuple(workers), text
