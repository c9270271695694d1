"""Schedules: sizes, orders and features become events. Knows no defect and no tensor."""

from qsim.sim.schedule.build import build_case, cell_of, ruled
from qsim.sim.schedule.graph import DATA, HELD, Block, Graph, Node, Product
from qsim.sim.schedule.order import Kind, Pass, parts_of, passes_of
from qsim.sim.schedule.process import CHECKPOINT
from qsim.sim.schedule.spec import GROUPS, Body, Feature, Linear, Order, ScheduleSpec, Scores, SpecError, features_of
from qsim.sim.schedule.walk import PASS, REPORT, grad_slot, param_slot, value_slot
from qsim.sim.schedule.writer import OTHER_FORMAT, queue_of, slot

__all__ = [
    "CHECKPOINT",
    "DATA",
    "GROUPS",
    "HELD",
    "OTHER_FORMAT",
    "PASS",
    "REPORT",
    "Block",
    "Body",
    "Feature",
    "Graph",
    "Kind",
    "Linear",
    "Node",
    "Order",
    "Pass",
    "Product",
    "ScheduleSpec",
    "Scores",
    "SpecError",
    "build_case",
    "cell_of",
    "features_of",
    "grad_slot",
    "param_slot",
    "parts_of",
    "passes_of",
    "queue_of",
    "ruled",
    "slot",
    "value_slot",
]
