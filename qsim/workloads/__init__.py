"""Where tensors come from. Knows schedules' keys and nothing of sweeps."""

from collections.abc import Mapping
from types import MappingProxyType

from qsim.workloads.capture import Capture, read_capture
from qsim.workloads.drawn import DATA, draw_operands
from qsim.workloads.model import OpenWorkload, Shaping, Workload
from qsim.workloads.replay import Replay, open_replay
from qsim.workloads.seeded import Seeded, open_seeded

WORKLOADS: Mapping[str, OpenWorkload] = MappingProxyType({"replay": open_replay, "seeded": open_seeded})
"""Kind -> how to open it. A workload is one file and one line here."""

__all__ = [
    "DATA",
    "WORKLOADS",
    "Capture",
    "OpenWorkload",
    "Replay",
    "Seeded",
    "Shaping",
    "Workload",
    "draw_operands",
    "open_replay",
    "open_seeded",
    "read_capture",
]
