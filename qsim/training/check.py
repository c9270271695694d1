"""Whether a configuration can run at all: words and numbers, before anything is read or drawn. Builds no schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from qsim.errors import StudyError
from qsim.sim import FIXES, PRESETS, SCOPES
from qsim.sim.schedule import Order
from qsim.training.config import RECOMPUTED, SAVED, TRAINED, TrainConfig, steps_of

MAX_VISITS = 5000
"""Layer visits of one run: its schedule is held whole, about 0.15 MB a visit. A longer run goes on from its state."""
_WORDS = {
    "model.activation": ("swiglu", "gelu"),
    "model.statistics": (SAVED, RECOMPUTED),
    "model.half": ("float32", "float16", "bfloat16"),
    "accumulation": ("exact", "blas", "tf32"),
    "quant.center_axis": ("tensor", "channel", "token"),
    "quant.center_source": ("current", "last", "ema"),
    "loop.order": tuple(order.value for order in Order),
    "loop.preset": tuple(PRESETS),
    "loop.scope": ("", *SCOPES),
    "fix": ("", *FIXES),
}
_AT_LEAST = {
    "model.layers": 1, "model.width": 1, "model.heads": 1, "model.hidden": 1, "model.context": 1, "data.batch": 1,
    "loop.steps": 1, "loop.warm_steps": 0, "loop.first": 0, "loop.microbatches": 1, "loop.workers": 1,
}  # fmt: skip


def check(config: TrainConfig) -> None:
    """StudyError with everything that is wrong, a line each: value, place, next step."""
    wrong = list(_problems(config))
    if wrong:
        raise StudyError("\n  ".join(wrong))


def _value(config: TrainConfig, place: str) -> object:
    found: object = config
    for name in place.split("."):
        found = getattr(found, name)
    return found


def _problems(config: TrainConfig) -> Iterator[str]:
    for place, words in _WORDS.items():
        if (word := _value(config, place)) not in words:
            yield f'{place} "{word}" is unknown; known: {", ".join(words)}'
    for place, least in _AT_LEAST.items():
        if not isinstance(number := _value(config, place), int) or number < least:
            yield f"{place} {number} is too small; it must be at least {least}"
    model, loop, scale = config.model, config.loop, config.optimizer.loss_scale
    if model.heads >= 1 and model.width % model.heads:
        yield f"model.width {model.width} is no multiple of model.heads {model.heads}"
    if any(not 0 <= step < loop.steps for step in loop.matched):
        yield f"loop.matched {list(loop.matched)} names a step outside 0..{loop.steps - 1}"
    visits = (loop.steps + loop.warm_steps) * loop.microbatches * model.layers
    if visits > MAX_VISITS:
        yield (
            f"{visits} layer visits (steps x microbatches x layers) are more than {MAX_VISITS} in one run: take fewer "
            "steps, and go on from its state (train_on)"
        )
    if not (math.isfinite(scale) and 2.0**-100 <= scale <= 2.0**100):
        yield f"optimizer.loss_scale {scale} is outside 2^-100..2^100; it is a factor of the loss, like 65536"
    elif config.optimizer.dynamic and not 1 <= scale <= 2.0**24:
        yield f"optimizer.loss_scale {scale} is outside 1..2^24, within which a dynamic one moves"
    if not (math.isfinite(model.key_mean) and abs(model.key_mean) <= 2.0**20):
        yield f"model.key_mean {model.key_mean} is outside -2^20..2^20"
    if any(abs(exponent) > 60 for exponent in config.data.spread):
        yield f"data.spread {list(config.data.spread)} has an exponent outside -60..60"
    if config.data.checkpoint.startswith(TRAINED):
        try:
            steps_of(config.data.checkpoint)
        except StudyError as error:
            yield str(error)
