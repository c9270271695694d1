"""Rows recorded on hardware, which stay outside the project: found, or the test is skipped with the reason."""

import os
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(os.environ.get("QSIM_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


def need_rows(name):
    """Arrays of ``name``.npz in the folder of hardware rows (QSIM_GOLDEN)."""
    path = FOLDER / "tensor_core" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"no hardware rows: {path} is not there (QSIM_GOLDEN names their folder)")
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}
