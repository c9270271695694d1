"""Replays of stateful quantizers: events, schedules, presets, defects, invariants, step. Knows no bit."""

from qsim.sim.case import Case, Context
from qsim.sim.defects import CONTRASTS, DEFECTS, FIXES, Defect, Fix, Variant, get_defect
from qsim.sim.env import Env
from qsim.sim.guard import replay_guarded, run_guarded
from qsim.sim.invariants import RULES, Violation, broken, check, in_order
from qsim.sim.judge import Lint, judge, lint
from qsim.sim.presets import PRESETS, Cadence, Preset, Reads
from qsim.sim.schedule import Body, Feature, Linear, Order, ScheduleSpec, Scores, build_case, ruled
from qsim.sim.scopes import SCOPES, Scope
from qsim.sim.step import Trace, World, records_of, replay, run, step
from qsim.sim.twin import correct_twin, high_precision_twin

__all__ = [
    "CONTRASTS",
    "DEFECTS",
    "FIXES",
    "PRESETS",
    "RULES",
    "SCOPES",
    "Body",
    "Cadence",
    "Case",
    "Context",
    "Defect",
    "Env",
    "Feature",
    "Fix",
    "Linear",
    "Lint",
    "Order",
    "Preset",
    "Reads",
    "ScheduleSpec",
    "Scope",
    "Scores",
    "Trace",
    "Variant",
    "Violation",
    "World",
    "broken",
    "build_case",
    "check",
    "correct_twin",
    "get_defect",
    "high_precision_twin",
    "in_order",
    "judge",
    "lint",
    "records_of",
    "replay",
    "replay_guarded",
    "ruled",
    "run",
    "run_guarded",
    "step",
]
