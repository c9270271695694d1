"""A notation for schedules: one line one phase of one GEMM, read and written without loss. Runs nothing."""

from qsim.sim.notation.model import Declared, NotationError, Written, declared_by
from qsim.sim.notation.read import read_schedule
from qsim.sim.notation.signs import BY_KIND, SIGNS, Here
from qsim.sim.notation.write import arguments_of, op_of, sign_text, write_schedule

__all__ = [
    "BY_KIND",
    "SIGNS",
    "Declared",
    "Here",
    "NotationError",
    "Written",
    "arguments_of",
    "declared_by",
    "op_of",
    "read_schedule",
    "sign_text",
    "write_schedule",
]
