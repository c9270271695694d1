"""Speed of the static lint against reading the same records as JSON: read the medians as ratios (``make bench``).

The floor is 100,000 events a second on one core, records and verdict together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from qsim.formats import get_format
from qsim.quant import make_recipe
from qsim.record import Record
from qsim.sim import PRESETS, Case, Linear, Order, ScheduleSpec, Scores, build_case, lint

SPEC = ScheduleSpec(steps=40, layers=24, microbatches=8, order=Order.ONE_F_ONE_B, stages=4)
GROUP = "lint a pipelined schedule of more than 200,000 events"


@pytest.fixture(scope="module")
def case() -> Case:
    body, recipe = (Linear(0, True), Scores(1)), make_recipe("delayed", fmt=get_format("e4m3"), window=1)
    return build_case(SPEC, body=body, preset=PRESETS["seed_correct"], recipe=recipe)


@pytest.mark.benchmark(group=GROUP)
def test_lint(benchmark: Any, case: Case) -> None:
    judged = benchmark.pedantic(lint, args=(case,), rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info["events"] = len(case.schedule)
    benchmark.extra_info["events_per_second"] = len(case.schedule) / benchmark.stats.stats.median
    assert (len(judged.records) > 200_000, judged.violations) == (True, ())


@pytest.mark.benchmark(group=GROUP)
def test_peer_msgspec_json(benchmark: Any, case: Case) -> None:
    records = lint(case).records
    text, decoder = msgspec.json.encode(records), msgspec.json.Decoder(list[Record])
    read = benchmark.pedantic(decoder.decode, args=(text,), rounds=5, iterations=1, warmup_rounds=1)
    assert records[-1] == read[-1]
