"""The tables of a training study: a row a protocol, then every seed. Reads severities; runs and measures nothing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qsim.report.packing import Column, aligned, key_room, packed
from qsim.report.severity_table import figure
from qsim.report.training_rows import TrainingRow, blocks, owners_off
from qsim.severity.seeds import Duel, Share, Spread, spread
from qsim.severity.training_record import NEVER, SPIKE, TrainSeverity

if TYPE_CHECKING:
    from rich.table import Table

PROTOCOL = "protocol"


def signed(value: float) -> str:
    """A difference or a logarithm: its sign and two digits, "0" for exactly zero, "-" where it was not measured."""
    if math.isnan(value) or value == 0:
        return figure(value)
    if abs(value) < 0.001:
        return f"{value:+.0e}"
    return f"{value:+.0f}" if 100 <= abs(value) < 10_000 else f"{value:+.2g}"


def ratio_text(value: float) -> str:
    """A ratio: "inf" where the run is not finite, "-" where it was not measured."""
    if not 0.01 <= value < 1000:
        return figure(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(value: float) -> str:
    """A share in whole percent, in more digits where that would hide that it is not 0 or not all."""
    if math.isnan(value):
        return "-"
    if 0 < value < 0.01:
        return f"{figure(100 * value, 2)}%"
    return f"{100 * value:.1f}%" if 0.99 < value < 1 else f"{100 * value:.0f}%"


def percents(low: float, high: float) -> str:
    """ "[48, 100%]": two ends of an interval of a share."""
    return f"[{percent(low).removesuffix('%')}, {percent(high)}]"


def seeds_text(share: Share) -> str:
    """ "3/5 [15, 95%]": seeds, and exact bounds of their share."""
    return f"{share.hits}/{share.trials} {percents(share.low, share.high)}"


def spread_text(found: Spread, seeds: int, text: Callable[[float], str]) -> str:
    """ "7.80 [5.10, 31.0]": the median with its interval; how many seeds, where not all were measured."""
    if not found.measured:
        return "-"
    ends = f" [{text(found.low)}, {text(found.high)}]" if found.measured > 1 else ""
    return text(found.median) + ends + ("" if found.measured == seeds else f" ({found.measured}/{seeds})")


def duel_text(found: Duel) -> str:
    """ "4/5 [28, 99%], 1 tied"; "-" where nothing was measured."""
    if not found.trials:
        return "-"
    return seeds_text(Share(found.worse, *found[2:])) + (f", {found.tied} tied" if found.tied else "")


def broken_text(severity: TrainSeverity) -> str:
    """The invariants broken; an outcome that the catalogue does not name is marked and shows what was due."""
    text = " ".join(severity.broken) or "none"
    return text if severity.as_expected else f"{text} (!) expected {' '.join(severity.expected) or 'none'}"


def bad_text(step: int) -> str:
    """The step, or "-" for never."""
    return "-" if step == NEVER else str(step)


def seeds_of(severity: TrainSeverity) -> str:
    """ "0..4", or every seed where they do not follow each other."""
    seeds = severity.seeds
    if len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}..{seeds[-1]}"
    return " ".join(str(seed) for seed in seeds)


def training_tables(rows: Sequence[TrainingRow], *, width: int = 126, seeds: bool = True) -> Iterator[Table]:
    """For each setting: verdict and steps, gradient norms, losses, state and work, a row a protocol; then every seed,
    unless ``seeds`` is False: the CSV has them too.

    Nothing is cut: what does not fit into ``width`` columns of text goes into a table below, or is wrapped.
    """
    for setting, group in blocks(rows):
        first = group[0].severity
        title = f"{setting}: " if setting else ""
        protocols = (Column(PROTOCOL, [row.protocol for row in group], left=True),)
        found = [row.severity for row in group]
        for name, columns in (
            (f"rules and steps, of {len(first.steps)}, seeds {seeds_of(first)}", _steps(found)),
            ("gradient norms", _norms(found)),
            ("losses", _losses(found)),
            ("state, replay, work", _state(found)),
        ):
            yield from packed(title + name, protocols, columns, width=width)
        if seeds:
            yield from _seed_tables(f"{title}every seed", group, width=width)


def _column(heading: str, found: Sequence[TrainSeverity], text: Callable[[TrainSeverity], str]) -> Column:
    return Column(heading, [text(severity) for severity in found])


def _listed(heading: str, found: Sequence[TrainSeverity], words: Callable[[TrainSeverity], Sequence[str]]) -> Column:
    """One word a seed, in the order of the seeds."""
    return Column(heading, aligned([words(severity) for severity in found]))


def _steps(found: Sequence[TrainSeverity]) -> list[Column]:
    def skipped(s: TrainSeverity) -> str:
        total = sum(s.skipped) / (len(s.steps) * len(s.seeds))
        return f"{percent(total)} {percents(*s.skipped_mean)}"

    return [
        Column("breaks", [broken_text(s) for s in found], left=True),
        _column("non-finite\nseeds", found, lambda s: seeds_text(s.any_nonfinite)),
        _column("skipping\nseeds", found, lambda s: seeds_text(s.any_skipped)),
        _listed("first bad step\na seed", found, lambda s: [bad_text(step) for step in s.first_bad]),
        _listed("steps skipped\na seed", found, lambda s: [str(count) for count in s.skipped]),
        _column("share\nskipped", found, skipped),
    ]


def _norms(found: Sequence[TrainSeverity]) -> list[Column]:
    def above(s: TrainSeverity) -> str:
        return f"{sum(s.above)}, {sum(s.above_twin)} of {len(s.steps) * len(s.seeds)}"

    return [
        _column("log2 ratio\nof steps", found, lambda s: spread_text(s.log2_norm_ratio, len(s.seeds), signed)),
        _column("left\nout", found, lambda s: percent(sum(s.left_out) / len(s.left_out))),
        _column("spike ratio\nmedian", found, lambda s: spread_text(spread(s.spike), len(s.seeds), ratio_text)),
        _column("\np90", found, lambda s: ratio_text(spread(s.spike).p90)),
        _listed("spike ratio\na seed", found, lambda s: [ratio_text(value) for value in s.spike]),
        _column(f"steps > {SPIKE}x\nrun, twin", found, above),
    ]


def _losses(found: Sequence[TrainSeverity]) -> list[Column]:
    return [
        _column("held out\nmedian gap", found, lambda s: spread_text(spread(s.final_gap), len(s.seeds), signed)),
        _column("held out\nworse seeds", found, lambda s: duel_text(s.worse)),
        _column("last quarter\nmedian gap", found, lambda s: spread_text(spread(s.late_gap), len(s.seeds), signed)),
        _column("last quarter\nworse seeds", found, lambda s: duel_text(s.late_worse)),
    ]


def _state(found: Sequence[TrainSeverity]) -> list[Column]:
    def points(s: TrainSeverity) -> str:
        counts = [count for step in s.replay for count in step.differing]
        return f"{_range(counts)} of {_range([step.points for step in s.replay])}" if s.replay else "-"

    def steps(s: TrainSeverity) -> str:
        return f"{percent(spread(s.replay_share).median)} of {len(s.replay)}" if s.replay else "-"

    def largest(s: TrainSeverity) -> str:
        log2, owner, seed = s.drift_largest
        return "-" if not owner else "0" if log2 == 0 else f"{signed(log2)} {owner}, seed {seed}"

    return [
        _column("replay differs\nin steps", found, steps),
        _column("differing\npoints", found, points),
        _column("log2 drift\nmedian", found, lambda s: figure(s.drift_median, 2)),
        _column("log2 drift\nlargest", found, largest),
        _column("commits\nmade/due", found, lambda s: f"{s.commits_actual}/{s.commits_expected}"),
        _column("owners\noff", found, lambda s: f"{owners_off(s)} of {len(s.commits)}"),
        _column("tokens\napplied", found, lambda s: f"{sum(s.tokens_applied):,} of {s.tokens * len(s.seeds):,}"),
    ]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"


class _Seed(NamedTuple):
    """One seed of one severity."""

    severity: TrainSeverity
    i: int


def _seed_tables(title: str, group: Sequence[TrainingRow], *, width: int) -> Iterator[Table]:
    """A line a protocol and seed; the protocol is named once."""
    found = [_Seed(row.severity, i) for row in group for i in range(len(row.severity.seeds))]
    names = [line for row in group for line in _beside(row.protocol, len(row.severity.seeds), key_room(width))]
    keys = (
        Column(PROTOCOL, names, left=True),
        Column("seed", [str(s.seeds[i]) for s, i in found]),
    )

    def column(heading: str, text: Callable[[TrainSeverity, int], str]) -> Column:
        return Column(heading, [text(s, i) for s, i in found])

    def most(s: TrainSeverity, i: int) -> str:
        return str(max(step.differing[i] for step in s.replay)) if s.replay else "-"

    def drift(s: TrainSeverity, i: int) -> str:
        return figure(max((abs(owner.log2[i]) for owner in s.drift), default=math.nan), 2)

    columns = [
        column("non-\nfinite", lambda s, i: str(s.nonfinite[i])),
        column("skipped", lambda s, i: str(s.skipped[i])),
        column("first\nbad", lambda s, i: bad_text(s.first_bad[i])),
        column("log2\nratio", lambda s, i: signed(_log2(s.norm_ratio[i]))),
        column("left\nout", lambda s, i: percent(s.left_out[i])),
        column("spike\nratio", lambda s, i: ratio_text(s.spike[i])),
        column(f">{SPIKE}x", lambda s, i: str(s.above[i])),
        column(f"twin\n>{SPIKE}x", lambda s, i: str(s.above_twin[i])),
        column("held-out\ngap", lambda s, i: signed(s.final_gap[i])),
        column("last\nquarter", lambda s, i: signed(s.late_gap[i])),
        column("replay\ndiffers", lambda s, i: percent(s.replay_share[i])),
        column("most\npoints", most),
        column("largest\ndrift", drift),
        column("tokens\napplied", lambda s, i: f"{s.tokens_applied[i]:,}"),
        column("same\nbits", lambda s, i: "yes" if s.identical[i] else "no"),
    ]
    yield from packed(title, keys, columns, width=width)


def _beside(name: str, lines: int, room: int) -> list[str]:
    """A name wrapped beside so many lines, the last of which takes what is left."""
    words = textwrap.wrap(name, room)
    words += [""] * (lines - len(words))
    return [*words[: lines - 1], "\n".join(words[lines - 1 :])]


def _log2(ratio: float) -> float:
    return -math.inf if ratio == 0 else math.log2(ratio)
