"""The backends that tests run over: by name, each a parameter of the fixture ``backend`` (tests/conftest.py)."""

from __future__ import annotations

import pytest

from qsim.backends import BACKENDS

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
PLAYED = "played"
"""The cuda backend on a device whose CuPy is played by numpy (tests/played_cupy.py): its launches, without a GPU."""

FAST = [name for name in BACKENDS if name not in ("oracle", "cuda")]
EACH = pytest.mark.parametrize("backend", ["oracle", *FAST, PLAYED, GPU], indirect=True)
"""Every backend."""
AGAINST_ORACLE = pytest.mark.parametrize("backend", [*FAST, PLAYED, GPU], indirect=True)
"""Every backend that is compared with the oracle."""
EMULATED = pytest.mark.parametrize("backend", ["emulated", PLAYED, GPU], indirect=True)
"""The backends that run the CUDA texts."""
