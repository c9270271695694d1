"""The controls by which the article's defect was isolated, as switches of one training run. Prints nothing.

The run under suspicion has the article's whole timing defect (D03) in its FP8 activations and attention operands. Each
control changes one thing and looks at the same batches: what stays is not due to it. There is no correct twin here;
what a gradient norm should be is taken from the run in which nothing is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from qsim.arrays import F64
from qsim.errors import UsageError
from qsim.training.config import CORRECT, HIGH_PRECISION, RECOMPUTED, LoopParams, QuantParams, TrainConfig
from qsim.training.log import MatchedPoint, TrainLog
from qsim.training.mechanism import RowSums, row_sums
from qsim.training.run import train

SPIKE = 3.0
"""A step spikes where its gradient norm is not finite, or above this multiple of the median norm of the run of the same
seed in which nothing is cast."""
SUSPECT = TrainConfig(
    quant=QuantParams(linear=("input",), window=1, attention=("q", "k"), attention_fmt="float8_e4m3fn"),
    loop=LoopParams(steps=20, matched=tuple(range(10))),
    defect="D03",
)
"""FP8 E4M3 activations and attention operands, scales of the newest amax, the article's whole timing defect."""
Change = Callable[[TrainConfig], TrainConfig]


def _with(**fields: object) -> Change:
    return lambda config: msgspec.structs.replace(config, **fields)


def _plain_attention(config: TrainConfig) -> TrainConfig:
    return msgspec.structs.replace(config, quant=msgspec.structs.replace(config.quant, attention=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One switch. stays, goes: what follows where spikes, or differing points, are there all the same, or are not."""

    name: str
    change: Change
    what: str
    stays: str
    goes: str


_ALL = (
    Control(
        name="accumulation",
        change=_with(accumulation="tf32"),
        what="operands of every product rounded to 10 mantissa bits, as TF32 does, in place of exact sums",
        stays="the accumulation of matrix products is not the cause",
        goes="look at the accumulation of matrix products",
    ),
    Control(
        name="low_precision_off",
        change=_with(defect=HIGH_PRECISION),
        what="nothing is cast",
        stays="the casts are not the cause: look at norms, checkpoints and attention",
        goes="it comes from the low-precision path: norms, checkpoints and attention repeat themselves to the bit",
    ),
    Control(
        name="high_precision_attention",
        change=_plain_attention,
        what="attention operands are not cast, activations of the linear layers are",
        stays="the attention operands are not its common source",
        goes="look at the casts of attention operands",
    ),
    Control(
        name="matched_points",
        change=lambda config: config,
        what="forward and recompute of one run, tensor by tensor",
        stays="a product's output differs where its input does not: it is decoded with other metadata in recompute",
        goes="forward and recompute are the same tensors",
    ),
)
CONTROLS: Mapping[str, Control] = MappingProxyType({control.name: control for control in _ALL})


def mechanism(config: TrainConfig = SUSPECT, seed: int = 0) -> Mapping[str, RowSums]:
    """Row sums of one seed under suspicion, in the correct protocol, and with attention computed again whole."""
    whole = msgspec.structs.replace(config.model, statistics=RECOMPUTED)
    runs = {
        "unpaired and mutating, LSE saved": config,
        "correct, LSE saved": msgspec.structs.replace(config, defect=CORRECT),
        "unpaired and mutating, LSE computed again": msgspec.structs.replace(config, model=whole),
    }
    return {name: row_sums(one, (seed,)) for name, one in runs.items()}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the walk. control: "" for the suspect itself. Per seed: largest, the largest gradient norm (inf where
    one is not finite), its step, and spikes, the number of steps that spike. differing: matched points that differ in
    some seed, of ``points``. first: the first product whose output differs while its input does not, "" for none.
    """

    control: str
    what: str
    largest: tuple[float, ...]
    at: tuple[int, ...]
    spikes: tuple[int, ...]
    steps: int
    differing: int
    points: int
    first: str
    verdict: str
    digest: tuple[str, ...]


def named_controls(names: Sequence[str]) -> tuple[str, ...]:
    """Each control once, all of them where none is named. UsageError for an unknown one."""
    unknown = [name for name in names if name not in CONTROLS]
    if unknown:
        raise UsageError(f'control "{unknown[0]}" is unknown; known: {", ".join(CONTROLS)}')
    return tuple(dict.fromkeys(names)) or tuple(CONTROLS)


def walk(
    config: TrainConfig = SUSPECT, seeds: Sequence[int] = (0, 1, 2), controls: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """The suspect, then it under each control (all of them by default), with what each rules out.

    Raises UsageError for an unknown control.
    """
    controls = named_controls(controls)
    log, plain = train(config, seeds), train(CONTROLS["low_precision_off"].change(config), seeds)
    usual = np.median([step.grad_norm for step in plain.steps], axis=0)
    base = _finding("", "the run under suspicion", log, usual)
    natural = sum(_finding("", "", plain, usual).spikes)
    found = [base]
    for name in controls:
        control = CONTROLS[name]
        changed = control.change(config)
        mine = plain if name == "low_precision_off" else log if changed == config else train(changed, seeds)
        here = _finding(name, control.what, mine, usual)
        found.append(msgspec.structs.replace(here, verdict=_verdict(control, base, here, natural)))
    return tuple(found)


NOTHING = "nothing follows: the run under suspicion has no spike and no point that differs"


def _verdict(control: Control, base: Finding, here: Finding, natural: int) -> str:
    """What follows; nothing where the suspect shows nothing. natural: spikes of the run in which nothing is cast."""
    excess = sum(base.spikes) > natural
    if not excess and not base.differing:
        return NOTHING
    if control.name == "matched_points":
        return control.stays if here.first else control.goes
    if control.name == "low_precision_off":
        return control.stays if here.differing else control.goes
    stays = sum(here.spikes) > natural if excess else here.differing > 0
    return control.stays if stays else control.goes


def _finding(name: str, what: str, log: TrainLog, usual: F64) -> Finding:
    norms = np.array([step.grad_norm for step in log.steps])
    ranked = np.where(np.isfinite(norms), norms, np.inf)
    spikes = (np.isinf(ranked) | (ranked > SPIKE * usual)).sum(axis=0)
    return Finding(
        control=name,
        what=what,
        largest=tuple(float(value) for value in ranked.max(axis=0)),
        at=tuple(log.steps[int(at)].step for at in ranked.argmax(axis=0)),
        spikes=tuple(int(count) for count in spikes),
        steps=len(log.steps),
        differing=sum(not all(point.same) for point in log.matched),
        points=len(log.matched),
        first=first_divergence(log.matched),
        verdict="",
        digest=log.digest,
    )


_INPUT_OF = {"qkv": "norm_attn", "up": "norm_ffn", "down": "activation"}
"""Matched product -> the matched point that is its input."""


def first_divergence(points: Sequence[MatchedPoint]) -> str:
    """The first product, in order of recompute, whose output differs in a seed in which its input does not: step and
    point, "" for none.
    """
    seen: dict[tuple[int, str], MatchedPoint] = {(point.step, point.point): point for point in points}
    for point in points:
        place, _, kind = point.point.rpartition(".")
        before = seen.get((point.step, f"{place}.{_INPUT_OF.get(kind, '')}"))
        if before is not None and any(a and not b for a, b in zip(before.same, point.same, strict=True)):
            return f"step {point.step} {point.point}"
    return ""
