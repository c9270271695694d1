"""Prices of defects. Knows traces; knows nothing of sweeps or of how a trace was made."""

from qsim.severity.measure import (
    CastSeverity,
    GemmKey,
    GemmSeverity,
    Severity,
    measure_severity,
    relative_error,
    replay_mismatch,
    ulp_distance,
)

__all__ = [
    "CastSeverity",
    "GemmKey",
    "GemmSeverity",
    "Severity",
    "measure_severity",
    "relative_error",
    "replay_mismatch",
    "ulp_distance",
]
