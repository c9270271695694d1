"""What a reader must know to read a training study: an ADEMP block, conditions, seeds. Draws no table.

ADEMP: aims, data-generating mechanism, estimands, methods, performance measures (T. P. Morris, I. R. White,
M. J. Crowther, "Using simulation studies to evaluate statistical methods", Statistics in Medicine 38, 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qsim.report.training_rows import TrainingRow, blocks
from qsim.report.training_table import percent, seeds_of
from qsim.severity.seeds import share, spread
from qsim.severity.training_record import SPIKE

MECHANISM = (
    "a run and its twin draw the same streams (common random numbers), keyed by seed, purpose, step and layer: "
    "weights, text, rounding and schedule are the same until the protocol parts them"
)
ESTIMANDS = (
    "per seed, then over seeds. Non-finite: steps whose loss or gradient norm is not finite. Skipped: steps whose "
    f"update was not applied. First bad step: skipped, non-finite, or a gradient norm above {SPIKE} times the "
    "twin's median norm (- for never). Log2 ratio of steps: median over steps of log2 (norm / the twin's norm of "
    "that step), both finite; left out: steps where one is not. Spike ratio: largest norm of the run / largest "
    "norm of the twin; inf: the run's is not finite, -: neither is. Gaps: loss minus the twin's, in nats: held "
    "out, after the last step, and the mean training loss of the last quarter of the steps; +inf: the run has no "
    "finite loss. Replay: matched points (a tensor of a layer) that differ in any bit between forward and "
    "recompute; in steps: of the median seed; points: least and most over seeds and steps. Log2 drift: log2 "
    "(scale / the twin's scale) at the end, median of the magnitude over owners and seeds. Owners off: those with "
    "other commits than in the twin. Tokens applied: of steps not skipped"
)
METHODS = (
    "every run against the correct twin of its seed. Invariants are judged on records, before any number. Medians "
    "and p90 are order statistics, so that inf stays inf; ratios are never averaged. In brackets: of a median the "
    "order statistics that hold it, of seeds exact (Clopper-Pearson) 95% bounds, of the share skipped a 95% "
    "percentile bootstrap over seeds, which covers less with few of them and has no width where all are equal"
)


def training_notes(rows: Sequence[TrainingRow], *, mechanism: str = "") -> list[str]:
    """Paragraphs, each one line. mechanism: what the runs train from and on; said beside the common random numbers."""
    if not rows:
        return ["no run has an outcome"]
    return [
        "Aims: what each protocol costs a training run against the correct one, and which rules and numbers show it.",
        f"Data: {mechanism + '; ' if mechanism else ''}{MECHANISM}.",
        f"Estimands: {ESTIMANDS}.",
        f"Methods: {METHODS}.",
        *_performance(rows),
        "Conditional on the model, the text and the weights that training starts from: an interval says how far other "
        "seeds would move a figure, not other models or texts. The unit is the seed: steps of a run are not "
        "independent, and none is counted as a trial. Intervals hold one by one, not for all protocols at once.",
        *_gates(rows),
        *_unexpected(rows),
        *_unmatched(rows),
    ]


def _performance(rows: Sequence[TrainingRow]) -> Iterator[str]:
    """Number of seeds and what it can tell: the Monte Carlo error of a study of so many."""
    severities = [row.severity for row in rows]
    for seeds in dict.fromkeys(severity.seeds for severity in severities):
        one = next(severity for severity in severities if severity.seeds == seeds)
        bound, coverage = share([False] * len(seeds)).high, spread([0.0] * len(seeds)).coverage
        yield (
            f"Performance: {len(seeds)} seeds ({seeds_of(one)}), each reported. An interval of a median covers "
            f"{percent(coverage)} at least; what no seed shows may still happen in {percent(bound)} of seeds."
        )


def _gates(rows: Sequence[TrainingRow]) -> Iterator[str]:
    """The controls: spikes of the twin itself, and runs that are the twin to the bit."""
    for setting, group in blocks(rows):
        where = f" ({setting})" if setting else ""
        twin = group[0].severity
        total = len(twin.steps) * len(twin.seeds)
        skipped = sum(flag for step in twin.steps for flag in step.twin_skipped)
        yield (
            f"Controls{where}: of {total} steps of the twin {sum(twin.above_twin)} are above {SPIKE} times its median "
            f"norm and {skipped} are skipped; the same to the bit as the twin in every seed: "
            f"{', '.join(row.protocol for row in group if all(row.severity.identical)) or 'no run'}."
        )


def _unexpected(rows: Sequence[TrainingRow]) -> Iterator[str]:
    odd = [_name(row) for row in rows if not row.severity.as_expected]
    if odd:
        yield f"Other invariants than the catalogue names: {', '.join(odd)}."


def _unmatched(rows: Sequence[TrainingRow]) -> Iterator[str]:
    """Owners that only one of the runs has: a state that is shared is no state of a layer."""
    for row in rows:
        if row.severity.unmatched:
            both = len(row.severity.drift)
            yield (
                f"{_name(row)}: {len(row.severity.unmatched)} owners are of this run or of the twin alone, {both} of "
                "both; drift is of the latter."
            )


def _name(row: TrainingRow) -> str:
    return f"{row.protocol} ({row.setting})" if row.setting else row.protocol
