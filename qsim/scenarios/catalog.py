"""Public reports of broken lifecycles, one literal each. What a report says stands in ``what``, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qsim.errors import StudyError
from qsim.scenarios.model import Scenario, View
from qsim.sim import Cadence, Feature, Linear, Order, ScheduleSpec
from qsim.workloads import Shaping


def _spec(*features: Feature, **sizes: object) -> ScheduleSpec:
    return ScheduleSpec(**{"steps": 4, "layers": 2, "features": frozenset(features), **sizes})  # type: ignore[arg-type]


_ACCUMULATED = {"microbatches": 4, "order": Order.ALTERNATE}
_RANKS = {"microbatches": 2, "workers": 2}

_ALL = (
    Scenario(
        name="te-1047", report="TransformerEngine 1047", defect="D14", repair="own_descale_in_cache",
        spec=_spec(Feature.WEIGHT_CACHE, steps=1, **_ACCUMULATED), view=View.MICROBATCH,
        what="Weights are cast once a step and cached. Forward's exit moves their scale after the first microbatch, "
        "and the later ones decode the old codes with the new descale: a small error first, a large one after.",
    ),
    Scenario(
        name="te-657", report="TransformerEngine 657, 659, 591", defect="D13", repair="descale_in_the_data",
        spec=_spec(microbatches=4, layers=4, order=Order.ONE_F_ONE_B), view=View.MICROBATCH,
        what="In a pipeline the forward of a later microbatch runs before the backward of an earlier one. Backward "
        "reads the live descale, which the later forward has moved.",
    ),
    Scenario(
        name="te-1083", report="TransformerEngine 1083, 1491", defect="D01", repair="descale_in_the_data",
        what="The descale lay beside the tensor in mutable metadata that moved before the GEMM. It became part of the "
        "data.",
    ),
    Scenario(
        name="te-24", report="TransformerEngine 24", defect="D21", variant="precision", repair="same_context",
        what="Recompute ran outside the low-precision region, so backward saw activations that forward never had.",
    ),
    Scenario(
        name="megatron-7538", report="Megatron-LM 7538", defect="D21", variant="precision", repair="same_context",
        spec=_spec(layers=4, microbatches=2, order=Order.ONE_F_ONE_B),
        what="The same in a pipeline: recompute chose another precision than forward.",
    ),
    Scenario(
        name="te-1568", report="TransformerEngine 1568", defect="D21", repair="same_context",
        what="Recompute ran under the default recipe instead of the one that forward ran under: another format.",
    ),
    Scenario(
        name="te-1190", report="TransformerEngine 1190, 1254", defect="D22", variant="token_taken",
        phases="b", repair="commit_every_unit",
        what="The scales of backward tensors were never updated: they kept their initial value for the whole run.",
    ),
    Scenario(
        name="te-2063", report="TransformerEngine 2063, 784", defect="D22", variant="token_taken",
        phases="b", repair="commit_every_unit", spec=_spec(**_ACCUMULATED),
        what="The module that was to trigger the backward update had no backward pass, so the update never came.",
    ),
    Scenario(
        name="nemo-8780", report="NeMo 8780", defect="D22", variant="frozen_layer", repair="commit_every_unit",
        view=View.LAYER,
        what="A frozen layer's state kept scale 1.0 while its inputs went on changing.",
    ),
    Scenario(
        name="te-3284", report="TransformerEngine 3284", defect="D22", repair="commit_every_unit",
        spec=_spec(layers=6), view=View.LAYER, window=16, shaping=Shaping(layer_spread=(0, -3, -6, -9, -12, -15)),
        what="Every scale stayed at 1.0, in training and in the tests that should have noticed. Layers are drawn ever "
        "smaller here: against high precision the error of scale 1 grows as sigma shrinks, with the right scale it "
        "does not.",
    ),
    Scenario(
        name="te-3284-stash", report="TransformerEngine 3284", defect="D18", repair="paired_stash",
        cadence=Cadence.STEP,
        what="The gate that puts a scale aside for recompute and the gate that takes it back disagreed: recompute "
        "asked a stash that nobody had filled, and went on with the live state.",
    ),
    Scenario(
        name="te-3394", report="TransformerEngine 3394", defect="D18", repair="paired_stash",
        spec=_spec(Feature.EVALUATION), cadence=Cadence.STEP,
        what="Modules in eval mode inside a checkpointed region put nothing aside and were asked for it all the same.",
    ),
    Scenario(
        name="te-3213", report="TransformerEngine 3213", defect="D02", repair="keyed_snapshot",
        what="Recompute updated the state again: twice the commits, and a recomputed tensor that is another one.",
    ),
    Scenario(
        name="thunder-1424", report="lightning-thunder 1424, 2027, 2344", defect="D02", repair="keyed_snapshot",
        spec=_spec(steps=96, layers=1), window=16, seeds=16, view=View.LAYER,
        what="The state was updated by forward and by recompute, so a window of 16 holds 8 different steps: more "
        "amaxes pass the window's largest.",
    ),
    Scenario(
        name="te-539", report="TransformerEngine 539, Megatron-LM 607", defect="D16", repair="forward_with_gradients",
        spec=_spec(Feature.WEIGHT_CACHE, layers=4, microbatches=4, order=Order.ONE_F_ONE_B), view=View.MICROBATCH,
        what="NaN, but only with FP8, a pipeline, recompute and gradient accumulation together: the first forward runs "
        "without gradients and does not fill the weight cache that later microbatches read.",
    ),
    Scenario(
        name="te-3296", report="TransformerEngine 3296", defect="D20", repair="functional_state",
        spec=_spec(Feature.NESTED),
        what="An update that hangs on recompute was applied once for each of two nested checkpoints.",
    ),
    Scenario(
        name="te-1723", report="TransformerEngine 1723", defect="D10", repair="fail_closed_to_one_worker",
        spec=_spec(**_RANKS),
        what="A state was put back through an alias: the commit in between was lost.",
    ),
    Scenario(
        name="pytorch-197039", report="pytorch 197039", defect="D39", repair="keyed_snapshot",
        what="A compiler moved the read of a value past its mutation: recompute reads the state after the commit.",
    ),
    Scenario(
        name="pytorch-96136", report="pytorch 96136, torchtitan 1593, Automodel 3247", defect="D02",
        repair="keyed_snapshot", spec=_spec(Feature.SELECTIVE),
        what="Statistics of batch normalisation, and counters of expert load, were updated by forward and again by "
        "recompute.",
    ),
    Scenario(
        name="te-728", report="TransformerEngine 728, 118", defect="D11", repair="wait_before_commit",
        spec=_spec(Feature.DATA_PARALLEL, **_RANKS), view=View.RANK,
        what="The reduction of amaxes was started, and the state committed before it had ended.",
    ),
    Scenario(
        name="torchtitan-4148", report="torchtitan 4148", defect="D24", repair="ignore_foreign",
        spec=_spec(Feature.EVALUATION),
        what="What an evaluation counted leaked into the training state.",
    ),
    Scenario(
        name="marin-7659", report="marin 7659", defect="D25", repair="max_merge",
        spec=_spec(**_ACCUMULATED), cadence=Cadence.STEP, view=View.MICROBATCH,
        what="Each microbatch overwrote the amax of the one before, so the last one spoke for the whole step.",
    ),
    Scenario(
        name="flax-3623", report="flax 3623, praxis 40, keras 19534", defect="D26", repair="max_merge",
        spec=_spec(**_ACCUMULATED), cadence=Cadence.STEP,
        what="Gradient accumulation summed the quantizer state like a gradient: amaxes add up instead of the largest "
        "one staying.",
    ),
    Scenario(
        name="maxtext-672", report="MaxText 672", defect="D26", variant="clip", repair="max_merge",
        spec=_spec(**_ACCUMULATED), cadence=Cadence.STEP,
        what="Gradient clipping reached the amax state and scaled it down.",
    ),
    Scenario(
        name="megatron-442", report="Megatron-LM 442", defect="D30", repair="declared_group",
        spec=_spec(Feature.DATA_PARALLEL, **_RANKS), view=View.RANK,
        what="Amaxes were reduced over the wrong group, the ranks' scales parted, and a 40B model diverged.",
    ),
    Scenario(
        name="te-74", report="TransformerEngine 74, 79", defect="D30", repair="declared_group",
        spec=_spec(Feature.DATA_PARALLEL, **_RANKS), view=View.RANK,
        what="The group of the amax reduction was not the one that shares the tensor.",
    ),
    Scenario(
        name="megatron-485", report="Megatron-LM 485", defect="D31", repair="same_collectives",
        spec=_spec(Feature.DATA_PARALLEL, **_RANKS), view=View.RANK,
        what="One rank reduced fewer tensors than the others: in a real run it hangs.",
    ),
    Scenario(
        name="te-825", report="TransformerEngine 825, 648", defect="D28", repair="skip_zero",
        spec=_spec(Feature.IDLE_EXPERT), view=View.LAYER, window=2,
        what="Experts without tokens reported an amax of 0, and it entered the window.",
    ),
    Scenario(
        name="te-123", report="TransformerEngine 123, 771, 982", defect="D33", repair="rebuild_on_load",
        spec=_spec(Feature.SAVE_RESTORE, Feature.WEIGHT_CACHE),
        what="A checkpoint restored part of the quantizer state: the rest was what a new process starts with.",
    ),
    Scenario(
        name="te-1985", report="TransformerEngine 1985, 2044", defect="D34", repair="one_storage",
        what="The amax history was allocated anew while the quantizer went on writing to the old one.",
    ),
    Scenario(
        name="primus-983", report="Primus 983, PaddleFleet 1523", defect="D36", repair="per_owner_state",
        spec=_spec(Feature.MIXED_FORMATS),
        what="A key that left out the recipe gave two quantizers of different formats one state.",
    ),
    Scenario(
        name="vllm-25513", report="vLLM 25513", defect="D38", repair="commit_every_unit",
        spec=_spec(Feature.GRAPH_CAPTURE),
        what="An update was folded away when the graph was captured: every replay runs with the scale of the capture.",
    ),
    Scenario(
        name="miles-credit-394", report="miles-credit 394", defect="D01", repair="keyed_snapshot",
        spec=_spec(layers=12, steps=4), body=(Linear(0),), view=View.LAYER,
        what="Six percent a layer over 175 layers is a factor of 5e4: a small gain in every layer multiplies. Here "
        "each layer's error stands alone, since no layer's output feeds the next.",
    ),
)  # fmt: skip

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""The scenarios, by name."""


def get_scenario(name: str) -> Scenario:
    """A scenario by name; StudyError for an unknown one."""
    if name not in SCENARIOS:
        raise StudyError(f'scenario "{name}" is unknown; known: {", ".join(SCENARIOS)}')
    return SCENARIOS[name]
