"""Speed of the matrix products on this machine, against numpy's own in the same run. Knows no format's bits."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qsim.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from qsim.arrays import AnyArray

F32_PEER, F64_PEER = "numpy float32 matmul", "numpy float64 matmul"
MMAEMU = "mmaemu"

REPEAT = 20
"""Calls of a product that takes less than some milliseconds."""

TRAINER = ((512, 64, 192), (512, 192, 64), (2048, 128, 384), (2048, 384, 384))
"""M, K, N of products in a small trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One line of the table.

    what, shape (M, N, K): the product. seconds: median. gmacs: 10^9 products a second. peer: what ratio compares with,
    of the same shape: speed over the peer's. floor: least ratio (or, of a model, least gmacs) that qsim promises, or
    None. path: how an exact product was made.
    """

    what: str
    shape: tuple[int, int, int]
    seconds: float
    gmacs: float
    peer: str | None
    ratio: float | None
    floor: float | None
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    what: str
    shape: tuple[int, int, int]
    call: Callable[[], object]
    peer: str | None = None
    floor: float | None = None
    path: str = ""
    repeat: int = 1


@dataclass(slots=True)
class _Arena:
    contenders: list[_Contender] = field(default_factory=list)

    def add(self, what: str, shape: tuple[int, int, int], call: Callable[[], object], **more: Any) -> None:
        self.contenders.append(_Contender(what=what, shape=shape, call=call, **more))


def product_rows(*, side: int = 2048, rounds: int = 5) -> tuple[ProductRow, ...]:
    """Measure square products of ``side`` (E5M2 of half of it), trainer shapes and a model, on all threads.

    Every round calls everything in turn, twice, and times the second call; the first round is not counted. UsageError
    for a side below 64. mmaemu is left out where it is not installed.
    """
    if side < 64 or rounds < 1:
        raise UsageError(f"bench of products of side {side} in {rounds} rounds: at least 64, and 1 round")
    arena = _arena(side)
    times: dict[int, list[float]] = {i: [] for i in range(len(arena.contenders))}
    for turn in range(rounds + 1):
        for i, contender in enumerate(arena.contenders):
            seconds = _timed(contender)
            if turn:
                times[i].append(seconds)
    medians = {(c.what, c.shape): statistics.median(times[i]) for i, c in enumerate(arena.contenders)}
    return tuple(_row(c, medians) for c in arena.contenders)


def product_data(rows: tuple[ProductRow, ...]) -> list[dict[str, object]]:
    """The rows for a program."""
    return [{name: getattr(row, name) for name in ProductRow.__dataclass_fields__} for row in rows]


def product_table(rows: tuple[ProductRow, ...]) -> Table:
    """The rows for a reader."""
    from rich.table import Table

    table = Table(title="Matrix products, medians; ratios to the peer of the same shape", title_justify="left",
                  show_edge=False, pad_edge=False, box=None, padding=(0, 1))  # fmt: skip
    for column in ("what", "M x N x K", "ms", "GMAC/s", "ratio", "floor", "peer", "how"):
        left = column in ("what", "peer", "how")
        table.add_column(column, overflow="fold", justify="left" if left else "right")
    for row in rows:
        measured = row.gmacs if row.what.startswith("model") else row.ratio
        floor = "" if row.floor is None else f"{row.floor:.3g}" + ("" if (measured or 0) >= row.floor else " !")
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what, " x ".join(map(str, row.shape)), f"{row.seconds * 1e3:.2f}", f"{row.gmacs:.2f}", ratio,
                      floor, row.peer or "", row.path)  # fmt: skip
    return table


def _row(contender: _Contender, medians: dict[tuple[str, tuple[int, int, int]], float]) -> ProductRow:
    seconds = medians[contender.what, contender.shape]
    m, n, k = contender.shape
    other = medians.get((contender.peer or "", contender.shape))
    return ProductRow(
        what=contender.what,
        shape=contender.shape,
        seconds=seconds,
        gmacs=m * n * k / seconds / 1e9,
        peer=contender.peer if other is not None else None,
        ratio=None if other is None else other / seconds,
        floor=contender.floor,
        path=contender.path,
    )


def _timed(contender: _Contender) -> float:
    contender.call()  # memory that the one before gave back is mapped anew here, as in no loop of equal products
    start = time.perf_counter()
    for _ in range(contender.repeat):
        contender.call()
    return (time.perf_counter() - start) / contender.repeat


def _arena(side: int) -> _Arena:
    from qsim.philox import Purpose, random_bell

    x, w = (random_bell(seed, Purpose.ROWS, (side, side)) for seed in (0, 1))
    arena = _Arena()
    _exact(arena, x, w)
    _trainer(arena)
    _model(arena)
    return arena


def _exact(arena: _Arena, x: AnyArray, w: AnyArray) -> None:
    import numpy as np

    from qsim.quant.plain import quantize
    from qsim.quant.products import scaled_gemm, scaled_gemm_with_report

    side = x.shape[0]
    for size in (side, side // 2):
        a, b = x[:size, :size].copy(), w[:size, :size].copy()
        shape = (size, size, size)
        for peer, dtype in ((F32_PEER, np.float32), (F64_PEER, np.float64)):
            arena.add(peer, shape, functools.partial(_times, a.astype(dtype), b.astype(dtype).T))
        promises = {"float8_e4m3fn": (F64_PEER, 0.85), "float4_e2m1fn": (F32_PEER, 0.85), "nvfp4_te": (F32_PEER, 0.4),
                    "mxfp4_rceil": (F32_PEER, 0.4)}  # fmt: skip
        for name, (peer, floor) in promises.items() if size == side else {"float8_e5m2": (F64_PEER, 0.2)}.items():
            packed = "4" in name.split("_")[0] and "float8" not in name
            left, right = (quantize(v, name, packed=packed) for v in (a, b))
            path = scaled_gemm_with_report(left, right, transpose_b=True).report.path
            call = functools.partial(scaled_gemm, left, right, transpose_b=True)
            arena.add(f"exact {name}{', packed' if packed else ''}", shape, call, peer=peer, floor=floor, path=path)


def _times(a: AnyArray, b: AnyArray) -> AnyArray:
    return a @ b


def _trainer(arena: _Arena) -> None:
    import numpy as np

    from qsim.gemm.exact import matmul
    from qsim.philox import Purpose, random_bell

    for m, k, n in TRAINER:
        a, b = random_bell(2, Purpose.ROWS, (m, k)), random_bell(3, Purpose.ROWS, (k, n))

        def plain(a: AnyArray = a, b: AnyArray = b) -> AnyArray:
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)

        peer, path = "float64 product with its casts", "float64 BLAS, a certificate an output"
        arena.add(peer, (m, n, k), plain, repeat=REPEAT)
        certified = functools.partial(matmul, a, b)
        arena.add("certified float32 matmul", (m, n, k), certified, floor=1 / 1.5, peer=peer, repeat=REPEAT, path=path)


def _model(arena: _Arena) -> None:
    import numpy as np

    from qsim.codec.api import encode
    from qsim.formats import E4M3FN
    from qsim.gemm.products import accumulate
    from qsim.gemm.scaled import ScaledOperand
    from qsim.philox import Purpose, random_bell

    shape = (256, 256, 1024)
    codes = [encode(random_bell(seed, Purpose.ROWS, (256, 1024)), "float8_e4m3fn") for seed in (4, 5)]
    sides = [ScaledOperand(codes=c, fmt=E4M3FN, row=np.ones(256)) for c in codes]
    peer = MMAEMU if _add_mmaemu(arena, codes, shape) else None
    arena.add("model hopper_wgmma", shape, lambda: accumulate(sides[0], sides[1], "hopper_wgmma"), floor=0.8, peer=peer)


def _add_mmaemu(arena: _Arena, codes: list[AnyArray], shape: tuple[int, int, int]) -> bool:
    if importlib.util.find_spec("mmaemu") is None or importlib.util.find_spec("torch") is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mmaemu
        import torch
    a, b = (torch.from_numpy(c).view(torch.float8_e4m3fn) for c in codes)

    def call() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mmaemu.accumulate(a, b, use_fast_accum=True, profile="hopper", splitk=1, backend="reference")

    arena.add(MMAEMU, shape, call)
    return True
