"""What catches what: every defect on families of schedules, against every check. Runs no study."""

from qsim.matrix.catches import Cell, Matrix, build_matrix
from qsim.matrix.families import FACTORS, Family, families
from qsim.matrix.numbers import Numbers, measure, vacuity

__all__ = ["FACTORS", "Cell", "Family", "Matrix", "Numbers", "build_matrix", "families", "measure", "vacuity"]
