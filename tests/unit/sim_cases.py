"""Small cases that the simulator's tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsim.backends import get_backend
from qsim.formats import POLICIES, get_format
from qsim.quant import OpId, Recipe, TensorRole, make_recipe
from qsim.sim import PRESETS, Case, Defect, Env, Linear, ScheduleSpec, Scores, build_case
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Body

BODY: Body = (Linear(0), Scores(1))
WITH_GRADIENTS: Body = (Linear(0, True), Scores(1))
THREE: Body = (Linear(0, True), Scores(1), Linear(2, True))
POLICY = POLICIES["ocp"]


def recipe_of(name: str, fmt: str = "e4m3", window: int = 1) -> Recipe:
    return make_recipe(name, fmt=get_format(fmt), window=window)


def case_of(
    recipe: Recipe,
    *,
    defect: Defect | None = None,
    spec: ScheduleSpec | None = None,
    preset: str = "seed_correct",
    body: Body = BODY,
    cadence: Cadence | None = None,
) -> Case:
    """An unrewritten case that can host ``defect``."""
    spec = spec or ScheduleSpec(steps=3, layers=3)
    if defect is not None:
        spec, cadence = defect.host(spec), defect.cadence or cadence
    return build_case(spec, body=body, preset=PRESETS[preset], recipe=recipe, cadence=cadence, policy=POLICY)


def tensors(seeds: Sequence[int], *, tokens: int = 4, channels: int = 6, outputs: int = 3):
    """A load function: every op has its own magnitude, so no two layers or steps share an amax."""

    def load(op: OpId) -> np.ndarray:
        role = TensorRole(op.role_id)
        shape = {TensorRole.WEIGHT: (channels, outputs), TensorRole.GRAD_OUTPUT: (tokens, outputs)}
        picked = []
        for seed in seeds:
            at = () if role is TensorRole.WEIGHT else (op.logical_step, op.microbatch)
            rng = np.random.default_rng((seed, op.layer_id, op.site, op.role_id, *at))
            x = rng.normal(size=shape.get(role, (tokens, channels))) + 0.25
            picked.append(x * 2.0 ** rng.uniform(-3, 3))
        return np.stack(picked).astype(np.float32)

    return load


def env_of(case: Case, *, seeds: Sequence[int] = (0, 1), backend: str = "numba") -> Env:
    return Env(load=tensors(seeds), backend=get_backend(backend), recipe=case.recipe, policy=POLICY, lead=(len(seeds),))
