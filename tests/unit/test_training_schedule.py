"""The schedule that a decoder's graph is walked into: what it holds, what it frees, what every defect breaks in it."""

from __future__ import annotations

from collections import Counter

import pytest

from qsim.errors import CaseError
from qsim.sim import DEFECTS, Case
from qsim.sim.control import Control, apply
from qsim.sim.events import Begin, Commit, Compute, Consume, Observe, Optimize, Phase, Quantize
from qsim.training.config import LoopParams, QuantParams, TrainConfig
from qsim.training.plan import plan_of
from tests.unit.training_cases import ALL, small

CENTRED = QuantParams(linear=(), attention=("q", "k"), attention_recipe="centred")
NOT_HERE = {
    "D12": "excludes dataflow",
    "D28": "no idle_expert",
    "D29": "no overflow",
    "D38": "no graph_capture",
}
"""Defects that a training run cannot host, and why."""
LOOPS = {
    "plain": {},
    "two microbatches": {"microbatches": 2},
    "alternate": {"microbatches": 2, "order": "alternate"},
    "workers": {"microbatches": 4, "workers": 2},
    "1f1b": {"microbatches": 4, "order": "1f1b"},
    "interleaved": {"microbatches": 4, "order": "interleaved"},
    "zero bubble": {"microbatches": 4, "order": "zero_bubble"},
    "no checkpoint": {"features": ("no_checkpoint",)},
    "nested": {"features": ("nested",)},
    "early stop": {"features": ("early_stop",)},
    "twice": {"features": ("twice",)},
    "shared": {"features": ("shared",)},
    "evaluation": {"features": ("evaluation",)},
    "weight cache": {"microbatches": 2, "features": ("weight_cache",)},
    "restart": {"features": ("save_restore",)},
    "rerun": {"features": ("rerun",)},
    "ranks": {"microbatches": 2, "workers": 2, "features": ("data_parallel",)},
    "mixed formats": {"features": ("mixed_formats",)},
    "te": {"preset": "te_fused", "microbatches": 2, "order": "1f1b"},
    "torchao": {"preset": "torchao_delayed"},
    "flax": {"preset": "flax"},
    "step": {"preset": "msamp"},
}


def config_of(loop: dict[str, object], **fields: object) -> TrainConfig:
    layers = 4 if loop.get("order") == "interleaved" else 2
    return small(quant=ALL, loop={"steps": 2, "warm_steps": 1} | loop, model={"layers": layers}, **fields)


def case_of(name: str) -> Case:
    return plan_of(config_of(LOOPS[name])).case


@pytest.mark.parametrize("name", LOOPS)
def test_the_correct_protocol_breaks_nothing_and_keeps_nothing(name: str) -> None:
    plan = plan_of(config_of(LOOPS[name]))
    assert () == plan.broken == plan.expected
    control = Control()
    for event in plan.case.schedule:
        apply(control, event)
    kept = {
        "param",
        "held",
        "report",
        "obs",
        "obs.f",
        "obs.b",
        "obs.e",
        "obs.r",
        "obs.group",
        "cache",
        "cache.snap",
        "checkpoint",
    }
    assert set() == {name.split("/")[0] for name in control.slots} - kept
    assert not any(control.queues.values())


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_breaks_in_training_what_the_catalogue_says(defect: str) -> None:
    config = small(quant=CENTRED if DEFECTS[defect].centred else ALL, loop={"steps": 2}, defect=defect)
    if defect in NOT_HERE:
        with pytest.raises(CaseError, match=NOT_HERE[defect]):
            plan_of(config)
        return
    plan = plan_of(config)
    assert plan.expected == plan.broken
    assert set(DEFECTS[defect].breaks) == set(plan.broken)


@pytest.mark.parametrize("defect", [name for name in DEFECTS if name not in NOT_HERE])
def test_its_first_fix_silences_it_in_training(defect: str) -> None:
    quant = CENTRED if DEFECTS[defect].centred else ALL
    fix = DEFECTS[defect].fixes[0]
    assert () == plan_of(small(quant=quant, loop={"steps": 2}, defect=defect, fix=fix)).broken


def test_two_defects_one_after_the_other_break_what_each_breaks() -> None:
    for protocol, broken in (
        ("D04+D02", {"I2", "I3", "I4", "I5"}),
        ("D04+D01", {"I1", "I4"}),
        ("D04+D03", {"I1", "I2", "I3", "I4", "I5"}),
    ):
        plan = plan_of(small(quant=ALL, defect=protocol))
        assert broken == set(plan.broken) == set(plan.expected)


def test_recompute_casts_again_and_begins_observes_and_commits_nothing() -> None:
    schedule = case_of("plain").schedule
    again = Counter(type(event) for event in schedule if event.phase is Phase.RECOMPUTE)
    assert 0 == again[Begin] == again[Observe] == again[Commit]
    casts = {e.op for e in schedule if isinstance(e, Quantize) and e.phase is Phase.FORWARD}
    assert casts == {e.op for e in schedule if isinstance(e, Quantize) and e.phase is Phase.RECOMPUTE}
    # Everything but P V, whose output is kept with the log-sum-exp, is multiplied again.
    assert {"linear", "scores"} == {e.gemm for e in schedule if isinstance(e, Consume) and e.phase is Phase.RECOMPUTE}


def test_attention_is_computed_again_where_its_statistics_are_not_saved() -> None:
    schedule = plan_of(small(quant=ALL, model={"statistics": "recomputed"})).case.schedule
    nodes = {e.node for e in schedule if isinstance(e, Compute) and e.phase is Phase.RECOMPUTE}
    assert {"rmsnorm", "split", "softmax", "add", "swiglu"} == nodes
    saved = {e.node for e in case_of("plain").schedule if isinstance(e, Compute) and e.phase is Phase.RECOMPUTE}
    assert {"rmsnorm", "split", "probabilities", "add", "swiglu"} == saved
    assert "values" in {e.gemm for e in schedule if isinstance(e, Consume) and e.phase is Phase.RECOMPUTE}


def test_an_early_stop_leaves_out_the_products_that_backward_does_not_ask_for() -> None:
    def products(name: str) -> Counter[str]:
        found = (e for e in case_of(name).schedule if isinstance(e, Consume) and e.phase is Phase.RECOMPUTE)
        return Counter(f"{e.gemm}.{e.op.site}" for e in found)

    left_out = products("plain") - products("early stop")
    assert {"linear.3": 6} == left_out  # down, in 2 layers and 3 steps


def test_every_step_updates_once_after_the_version_of_its_weights_has_moved() -> None:
    schedule = case_of("two microbatches").schedule
    updates = [at for at, e in enumerate(schedule) if isinstance(e, Compute) and e.node == "update"]
    assert [at - 1 for at in updates] == [at for at, e in enumerate(schedule) if isinstance(e, Optimize)]
    assert [0, 1, 2] == [schedule[at].at.logical_step for at in updates]  # type: ignore[union-attr]
    # loss of each microbatch, parameter and gradient of each name, and what the optimizer holds
    assert 1 + 2 + 2 * 16 == len(schedule[updates[0]].ins)  # type: ignore[union-attr]


def test_a_run_that_goes_on_counts_its_steps_from_where_it_is() -> None:
    loop = LoopParams(first=7, steps=2, warm_steps=0)
    schedule = plan_of(small(loop={"first": 7, "steps": 2, "warm_steps": 0})).case.schedule
    assert {7, 8} == {e.op.logical_step for e in schedule if isinstance(e, Quantize)}
    assert 7 == loop.first
