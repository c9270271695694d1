"""Options that name a schedule, and the words of a command as a study of one cell. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

OrderOption = Annotated[
    str, typer.Option("--order", help="forward_first, alternate, 1f1b, interleaved or zero_bubble.")
]
StagesOption = Annotated[int | None, typer.Option("--stages", min=1, help="Stages of a pipelined order; 2 by default.")]
FeatureOption = Annotated[
    list[str] | None, typer.Option("--feature", help="What else the schedule does, as often as you like: nested ...")
]


def schedule_sets(
    sizes: Mapping[str, int | None], order: str, stages: int | None, features: list[str] | None
) -> list[str]:
    """The overrides that these options stand for; what was not given is left to the study."""
    import json

    given = dict(sizes) | {"stages": stages}
    sets = [f"schedule.{key}={value}" for key, value in given.items() if value is not None]
    sets += [f"schedule.order={order}"] if order else []
    return sets + ([f"schedule.features={json.dumps(features)}"] if features else [])


def defect_id(defect: str) -> str:
    """The id of a defect that was given by name; what is no name stays as it is."""
    from qsim.sim import CONTRASTS, DEFECTS

    by_name = {d.name: d.id for d in (*DEFECTS.values(), *CONTRASTS.values())}
    whole, slash, variant = defect.partition("/")
    return by_name.get(whole, whole) + slash + variant


def one_cell_study(
    defect: str,
    fmt: str = "e4m3",
    recipe: str = "delayed",
    window: int = 1,
    preset: str = "seed_correct",
    backend: str = "numba",
) -> str:
    """The words of a command as a study of one cell, so that they are checked in one place."""
    import json

    text = json.dumps  # a JSON string is a TOML string
    return (
        f"schema = 1\n[grid]\ndefects = [{text(defect_id(defect))}]\nformats = [{text(fmt)}]\n"
        f"recipes = [{text(recipe)}]\nwindows = [{window}]\n"
        f"[run]\npreset = {text(preset)}\nbackend = {text(backend)}\n"
    )
