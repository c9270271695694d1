"""Where tensors come from. Knows schedules' keys and nothing of sweeps."""

from qsim.workloads.capture import Capture, read_capture
from qsim.workloads.replay import Replay, Shaping, load_capture

WORKLOADS = ("replay",)

__all__ = ["WORKLOADS", "Capture", "Replay", "Shaping", "load_capture", "read_capture"]
