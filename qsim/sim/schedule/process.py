"""A process ends and another goes on; a step is taken back and run again. Knows no pass and no cast."""

from __future__ import annotations

from qsim.quant import OpId, StateKey, TensorRole
from qsim.sim.events import Compute, Drop, Event, LoadState, Phase, Restart, SaveState, Slot
from qsim.sim.schedule.walk import PASS, Walker

CHECKPOINT = "checkpoint"
"""The slot that a save fills."""

_MODEL = OpId(0, role_id=int(TensorRole.WEIGHT))


def _copied(model: tuple[Slot, ...]) -> tuple[tuple[Slot, ...], Compute, Compute]:
    """Places for a copy of the model, the event that fills them, and the one that brings it back."""
    copies = tuple(f"{CHECKPOINT}/{name}" for name in model)
    there, back = (model, copies), (copies, model)
    return copies, Compute(Phase.UPDATE, _MODEL, PASS, *there), Compute(Phase.UPDATE, _MODEL, PASS, *back)


def taken_back(part: list[Event], cells: tuple[StateKey, ...], walker: Walker | None) -> list[Event]:
    """A step and its way back: states and queues from a checkpoint, a model from a copy of itself."""
    save, load = SaveState(Phase.UPDATE, cells, CHECKPOINT), LoadState(Phase.UPDATE, CHECKPOINT)
    if walker is None:
        return [save, *part, load]
    copies, there, back = _copied(walker.kept())
    return [there, save, *part, load, back, Drop(Phase.UPDATE, copies)]


def restarted(cells: tuple[StateKey, ...], walker: Walker | None) -> list[Event]:
    """The process ends, and another one reads the checkpoint: a model is made anew first, as a program makes it."""
    save, load = SaveState(Phase.UPDATE, cells, CHECKPOINT), LoadState(Phase.UPDATE, CHECKPOINT)
    if walker is None:
        return [save, Restart(Phase.UPDATE, (CHECKPOINT,)), load]
    copies, there, back = _copied(walker.kept())
    restart = Restart(Phase.UPDATE, (CHECKPOINT, *copies))
    return [save, there, restart, *walker.start(), load, back, Drop(Phase.UPDATE, copies)]
