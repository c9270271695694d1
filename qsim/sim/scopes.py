"""Scopes: which operations share one state. A scope is data; builders write its owners into events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsim.quant import ANY, OpId, StateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """OpId -> StateKey. A field that is False is shared by all its values."""

    name: str
    layer: bool
    site: bool = True
    role: bool = True
    worker: bool = False

    def __call__(self, op: OpId) -> StateKey:
        """The owner of ``op``'s state under this scope."""
        return StateKey(
            layer_id=op.layer_id if self.layer else ANY,
            site=op.site if self.site else ANY,
            role_id=op.role_id if self.role else ANY,
            worker_id=op.worker_id if self.worker else ANY,
        )


LAYER = Scope(name="layer", layer=True)
LAYER_WORKER = Scope(name="layer_worker", layer=True, worker=True)
MODEL = Scope(name="model", layer=False)

SCOPES: Mapping[str, Scope] = MappingProxyType({scope.name: scope for scope in (LAYER, LAYER_WORKER, MODEL)})
