"""A kernel whose text is changed in one place, emulated: what a test must see. Knows no kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import cuda_kernels._kernel as kernels
from cuda_kernels import host, source
from cuda_kernels._kernel import Kernel
from tests.places import Given


def mutant(
    monkeypatch: Any, kernel: Kernel, file: str = "", old: str = "", new: str = "", *, drop: str = "",
    options: Sequence[str] = (),
) -> Given:  # fmt: skip
    """A place where ``kernel`` has ``new`` for ``old`` in the text ``file`` (none: as it is), and any other as ever.

    drop: a pattern of text that this kernel does not need, so that it is built faster.
    """
    assert not file or source(file).count(old) == 1, (file, old)

    def text(name: str) -> str:
        own = source(name)
        own = own.replace(old, new) if name == file else own
        return re.sub(drop, "", own) if drop else own

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "source", text)
        made = host.build(kernel.text, kernel.entry, options=("-O1", *options))
    return Given(made=made, entry=kernel.entry)
