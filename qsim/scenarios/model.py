"""What a scenario is: a public report as data. Plays nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from qsim.sim import Cadence, ScheduleSpec
from qsim.sim.schedule import Body
from qsim.workloads import Shaping
from qsim.workloads.seeded import BODY


class View(Enum):
    """Along which axis the figures of a scenario are shown."""

    STEP = "step"
    MICROBATCH = "microbatch"
    LAYER = "layer"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One public report, reduced to a schedule.

    name: "te-1047"; report: where it was told, "TransformerEngine 1047". defect and variant: what is put into the
    schedule; repair: the fix of FIXES that mends it. what: two or three sentences: what was reported, and what stands
    for it here. view: the axis of the figures; phases: those whose GEMMs are compared. window, fmt, recipe, preset,
    shaping: as in a study; tensors are seeded.
    """

    name: str
    report: str
    defect: str
    repair: str
    what: str
    variant: str = ""
    spec: ScheduleSpec = field(default_factory=lambda: ScheduleSpec(steps=4, layers=2))
    cadence: Cadence | None = None
    preset: str = "seed_correct"
    recipe: str = "delayed"
    fmt: str = "e4m3"
    window: int = 1
    body: Body = BODY
    shaping: Shaping = field(default_factory=Shaping)
    view: View = View.STEP
    phases: str = "frb"
    seeds: int = 8
