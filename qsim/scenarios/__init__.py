"""Public reports as schedules: what broke, what it cost, what repairs it. Runs no study."""

from qsim.scenarios.catalog import SCENARIOS, get_scenario
from qsim.scenarios.model import Scenario, View
from qsim.scenarios.play import Outcome, play_scenario

__all__ = ["SCENARIOS", "Outcome", "Scenario", "View", "get_scenario", "play_scenario"]
