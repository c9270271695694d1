"""What a run costs, and the dearest run of a space, for a reader and as JSON. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.errors import CaseError, StudyError, UsageError
from qsim.explore import Space, Token
from qsim.explore.cost import Cost, Setting, Worst, cost_of, worst_of
from qsim.report.exploration import run_text
from qsim.report.severity_table import figure

NOT_MEASURED = (CaseError, StudyError, UsageError)
"""No twin, no tensors, or too many steps: said in the report, for the search itself is fine."""


def cost_report(token: Token, whole: Space, setting: Setting, *, violation: bool = True) -> Iterator[str]:
    """What the run of a token costs; of a ``violation`` also the dearest run of ``whole`` that breaks its rule."""
    yield f"severity ({_setting_text(setting, token.space)})"
    try:
        yield f"  this run: {_cost(cost_of(token.space, token.choices, setting))}"
        worst = worst_of(whole, setting, invariant=token.invariant) if violation else None
    except NOT_MEASURED as error:
        yield f"  not measured: {error}"
        return
    if worst is not None:
        yield from _worst(worst, token.invariant, whole)


def _worst(worst: Worst, invariant: str, whole: Space) -> Iterator[str]:
    one = worst.measured == 1
    if worst.by_chance:
        which = f"{worst.measured} run{'s' * (not one)} by chance"
    else:
        which = f"{'the run of one' if one else f'a run of each of {worst.measured}'} class{'es' * (not one)}"
    yield (
        f"  worst of {which} that break{'s' * one} {invariant} "
        f"({'all there are' if worst.all_of_them else 'there are more'}): {run_text(worst.cost.choices)}"
    )
    yield f"    {_cost(worst.cost)}"
    yield f"    {Token(space=whole, choices=worst.cost.choices, invariant=invariant).text()}"


def _setting_text(setting: Setting, space: Space) -> str:
    return (
        f"{setting.fmt}, recipe {space.recipe}, window {setting.window}, {setting.seeds} seeds, the shipped "
        f"activations, {setting.after} step{'s' * (setting.after != 1)} more"
    )


def _cost(cost: Cost) -> str:
    twin = "the correct twin" + (" (its workers wait for each other after a step)" if cost.waiting else "")
    if cost.identical:
        return f"0: every GEMM output is bit-identical to that of {twin}"
    return (
        f"error up to {figure(cost.worst)} ({cost.gemm}, phase {cost.phase}), median {figure(cost.median)}; "
        f"gain {figure(cost.gain)}; {100 * cost.wrong:.1f}% of GEMM outputs differ from {twin}"
    )


def cost_data(token: Token, whole: Space, setting: Setting, *, violation: bool = True) -> dict[str, object]:
    """The same as JSON data; a figure that is not finite is a word."""
    data: dict[str, object] = {"setting": _setting_text(setting, token.space)}
    try:
        data["run"] = _cost_data(cost_of(token.space, token.choices, setting))
        worst = worst_of(whole, setting, invariant=token.invariant) if violation else None
    except NOT_MEASURED as error:
        return data | {"not_measured": str(error)}
    if worst is not None:
        name = Token(space=whole, choices=worst.cost.choices, invariant=token.invariant).text()
        about = {"token": name, "measured": worst.measured, "all": worst.all_of_them, "by_chance": worst.by_chance}
        data["worst"] = _cost_data(worst.cost) | about
    return data


def _cost_data(cost: Cost) -> dict[str, object]:
    def number(value: float) -> float | str:
        return value if abs(value) < float("inf") else str(value)

    return {
        "choices": list(cost.choices),
        "worst": number(cost.worst),
        "median": number(cost.median),
        "wrong": cost.wrong,
        "gain": number(cost.gain),
        "gemm": cost.gemm,
        "phase": cost.phase,
        "identical": cost.identical,
        "twin_waits": cost.waiting,
    }
