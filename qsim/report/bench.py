"""Speed of the codecs on this machine, against named peers in the same run. Knows no format's bits.

Every round calls every contender once, in turn, so that a busy moment of the machine hits all of them; figures are
medians over the rounds. GB/s counts the bytes of the float32 side, read or written. Times of a shared machine are
noise; their ratios are what to read.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qsim.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from qsim.arrays import F32

MEBI = 1 << 20
COPY = "np.copyto"
CEILING = "truncation to a byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    what, threads: the contender. seconds: median. gigabytes: GB of float32 it reads or writes a second. ratio: its
    speed over np.copyto's, copying the float32 side on one thread. floor: least ratio that qsim promises, or None.
    bytes_per_element: what its passes read and write; np.copyto moves 8; None for a peer whose temporaries are not
    known. peers: peer -> speed over the peer's.
    """

    what: str
    threads: int
    seconds: float
    gigabytes: float
    ratio: float
    floor: float | None
    bytes_per_element: float | None
    peers: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    what: str
    threads: int
    call: Callable[[], object]
    bytes_per_element: float | None
    floor: float | None = None
    peers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Arena:
    """The arrays and the contenders of one run."""

    size: int
    x: F32
    contenders: list[_Contender] = field(default_factory=list)

    def add(self, what: str, call: Callable[[], object], *, threads: int = 1, moved: float | None = 5.0,
            floor: float | None = None, peers: tuple[str, ...] = ()) -> None:  # fmt: skip
        self.contenders.append(
            _Contender(what=what, threads=threads, call=call, bytes_per_element=moved, floor=floor, peers=peers)
        )


def bench_rows(*, mebi: int = 64, rounds: int = 7) -> tuple[Row, ...]:
    """Measure ``mebi`` Mi elements over ``rounds`` rounds, after one that is not counted.

    UsageError for sizes below 1. Peers that are not installed (ml_dtypes, torch, torchao) are left out.
    """
    if mebi < 1 or rounds < 1:
        raise UsageError(f"bench of {mebi} Mi elements and {rounds} rounds: both must be at least 1")
    arena = _arena(mebi * MEBI)
    times: dict[int, list[float]] = {i: [] for i in range(len(arena.contenders))}
    for turn in range(rounds + 1):
        for i, contender in enumerate(arena.contenders):
            seconds = _timed(contender)
            if turn:
                times[i].append(seconds)
    medians = {(c.what, c.threads): statistics.median(times[i]) for i, c in enumerate(arena.contenders)}
    return tuple(_row(c, medians, arena.size) for c in arena.contenders)


def bench_data(rows: tuple[Row, ...]) -> list[dict[str, object]]:
    """The rows for a program."""
    return [{name: getattr(row, name) for name in Row.__dataclass_fields__} for row in rows]


def bench_table(rows: tuple[Row, ...]) -> Table:
    """The rows for a reader."""
    from rich.table import Table

    table = Table(title="Codecs, medians; ratios to np.copyto of the float32 side on one thread", title_justify="left",
                  show_edge=False, pad_edge=False, box=None, padding=(0, 1))  # fmt: skip
    for column in ("what", "threads", "GB/s", "x copyto", "floor", "bytes/elem", "speed over"):
        table.add_column(column, overflow="fold", justify="left" if column in ("what", "speed over") else "right")
    for row in rows:
        floor = "" if row.floor is None else f"{row.floor:g}" + ("" if row.ratio >= row.floor else " !")
        peers = ", ".join(f"{name} {ratio:.3g}x" for name, ratio in row.peers.items())
        moved = "" if row.bytes_per_element is None else f"{row.bytes_per_element:g}"
        table.add_row(row.what, str(row.threads), f"{row.gigabytes:.2f}", f"{row.ratio:.2f}", floor, moved, peers)
    return table


def bench_notes(rows: tuple[Row, ...]) -> Iterator[str]:
    """What bounds the figures, measured in the same run."""
    ceilings = [row for row in rows if row.what == CEILING]
    for row in ceilings:
        yield (
            f"{row.what}, {row.threads} thread{'s' if row.threads > 1 else ''}: {row.gigabytes:.2f} GB/s, what memory "
            "allows a kernel that reads float32 and writes bytes"
        )
    yield (
        "floor: the least ratio that qsim is held to, '!' marks a figure below it. bytes/elem: what the passes read "
        "and write, blank where it is not known; np.copyto moves 8. speed over: peers on as many threads, or on one "
        "where they have no more."
    )


def _row(contender: _Contender, medians: dict[tuple[str, int], float], size: int) -> Row:
    seconds = medians[contender.what, contender.threads]
    peers = {
        peer: medians[peer, threads] / seconds
        for peer in contender.peers
        for threads in (contender.threads, 1)
        if (peer, threads) in medians and (threads == contender.threads or (peer, contender.threads) not in medians)
    }
    return Row(
        what=contender.what,
        threads=contender.threads,
        seconds=seconds,
        gigabytes=4 * size / seconds / 1e9,
        ratio=medians[COPY, 1] / seconds,
        floor=contender.floor,
        bytes_per_element=contender.bytes_per_element,
        peers=peers,
    )


def _timed(contender: _Contender) -> float:
    from qsim.codec.threads import threads

    with threads(contender.threads):
        start = time.perf_counter()
        contender.call()
        return time.perf_counter() - start


def _arena(size: int) -> _Arena:
    import numpy as np

    from qsim.codec.threads import thread_count
    from qsim.philox import Purpose, random_bell

    part = random_bell(0, Purpose.ROWS, (min(size, MEBI),))
    x = np.tile(part, -(-size // part.size))[:size]
    arena = _Arena(size=size, x=x)
    out = np.zeros_like(x)
    arena.add(COPY, lambda: np.copyto(out, x), moved=8.0)
    counts = (1,) if thread_count() == 1 else (1, thread_count())
    _flat_casts(arena, counts)
    _fused(arena, counts)
    _blocks(arena, counts)
    _decode(arena, counts)
    _centred(arena, counts)
    return arena


def _flat_casts(arena: _Arena, counts: tuple[int, ...]) -> None:
    import numpy as np

    from qsim.codec import encode
    from qsim.codec.numba_kernels import truncate
    from qsim.codec.threads import in_chunks

    x, codes, bits = arena.x, np.zeros(arena.size, np.uint8), arena.x.view(np.uint32)
    for n in counts:
        arena.add(CEILING, lambda: in_chunks(lambda a, b: truncate(bits[a:b], codes[a:b]), bits.size), threads=n)
        floor = 0.8 if n == 1 else 1.5 if n == 2 else None
        for name in ("float8_e4m3fn", "float8_e5m2"):
            peers = (f"torch {name}", f"ml_dtypes {name}")
            call = functools.partial(encode, x, name, out=codes)
            arena.add(f"encode {name}", call, threads=n, floor=floor, peers=peers)
        for name, cast in _torch_casts(x):
            arena.add(name, functools.partial(cast, n), threads=n)
    if importlib.util.find_spec("ml_dtypes") is not None:
        import ml_dtypes

        for name in ("float8_e4m3fn", "float8_e5m2"):
            arena.add(f"ml_dtypes {name}", functools.partial(x.astype, getattr(ml_dtypes, name)))


def _torch_casts(x: F32) -> Iterator[tuple[str, Callable[[int], object]]]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    source = torch.from_numpy(x)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        target = torch.zeros(x.size, dtype=torch.uint8).view(getattr(torch, name))

        def call(n: int, target: Any = target) -> None:
            torch.set_num_threads(n)
            target.copy_(source)

        yield f"torch {name}", call


def _fused(arena: _Arena, counts: tuple[int, ...]) -> None:
    import numpy as np

    from qsim.backends import CastSpec, get_backend
    from qsim.codec import encode
    from qsim.formats import E4M3FN, POLICIES

    x, scale, spec = arena.x, np.asarray(100, np.float32), CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"])
    backend, scaled, codes = get_backend("numba"), np.zeros_like(arena.x), np.zeros(arena.size, np.uint8)

    def apart() -> object:
        np.multiply(x, scale, out=scaled)
        encode(scaled, "float8_e4m3fn", out=codes)
        return max(x.max(), -x.min())

    for n in counts:
        arena.add("scale + encode + amax + counts in one pass", lambda: backend.quantize(x, scale, None, spec),
                  threads=n, floor=0.7, peers=("scale, encode, amax in separate passes",))  # fmt: skip
        arena.add("scale, encode, amax in separate passes", apart, threads=n, moved=21.0)


def _blocks(arena: _Arena, counts: tuple[int, ...]) -> None:
    from qsim.backends import get_backend
    from qsim.codec.scaled import get_scale_recipe
    from qsim.formats import POLICIES

    columns = 4096
    matrix, backend, policy = arena.x.reshape(-1, columns), get_backend("numba"), POLICIES["ocp"]
    floors = {"float4_e2m1fn": (0.7, 8.5), "mxfp4_rceil": (0.5, 4.53), "nvfp4_te": (0.4, 8.56)}
    for n in counts:
        for name, (floor, moved) in floors.items():
            recipe = get_scale_recipe(name)
            cast = functools.partial(backend.quantize_blocks, matrix, recipe, policy, packed=True, counting=False)
            peers = (f"torchao {name}",)
            arena.add(f"{name} packed, with scales", cast, threads=n, floor=floor, moved=moved, peers=peers)
    for name, call in _torchao_casts(matrix):
        arena.add(f"torchao {name}", call, moved=None)


def _torchao_casts(matrix: F32) -> Iterator[tuple[str, Callable[[], object]]]:
    """torchao in eager mode, on a sixteenth of the rows sixteen times over: its temporaries would not fit."""
    if importlib.util.find_spec("torchao") is None or importlib.util.find_spec("torch") is None:
        return
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    rows = max(matrix.shape[0] // 16, 1)
    part, turns = torch.from_numpy(matrix[:rows]), matrix.shape[0] // rows

    def mx() -> None:
        torch.set_num_threads(1)  # as its row says; the last cast may have left another number
        for _ in range(turns):
            to_mx(part, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)

    def nv() -> None:
        torch.set_num_threads(1)  # as its row says; the last cast may have left another number
        for _ in range(turns):
            nvfp4_quantize(part, 16, per_tensor_amax_to_scale(part.abs().max()))

    yield "mxfp4_rceil", mx
    yield "nvfp4_te", nv


def _decode(arena: _Arena, counts: tuple[int, ...]) -> None:
    import numpy as np

    from qsim.codec import decode, encode

    codes, out = encode(arena.x, "float8_e4m3fn"), np.zeros_like(arena.x)
    for n in counts:
        arena.add("decode float8_e4m3fn", lambda: decode(codes, "float8_e4m3fn", out=out), threads=n, floor=0.5,
                  peers=("ml_dtypes decode",))  # fmt: skip
    if importlib.util.find_spec("ml_dtypes") is not None:
        import ml_dtypes

        typed = codes.view(ml_dtypes.float8_e4m3fn)
        arena.add("ml_dtypes decode", lambda: typed.astype(np.float32))


def _centred(arena: _Arena, counts: tuple[int, ...]) -> None:
    import numpy as np

    from qsim.quant.plain import quantize

    matrix = arena.x.reshape(-1, 4096)

    def in_numpy() -> object:
        """Channel mean, residual, scale, thresholds, pack: plain numpy, one operation after another."""
        r = matrix - matrix.mean(axis=0, dtype=np.float64).astype(np.float32)
        y = np.abs(r) * np.float32(6 / max(r.max(), -r.min()))
        code = np.signbit(r).astype(np.uint8) << 3
        for tie, include in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
            code += y >= np.float32(tie) if include else y > np.float32(tie)
        return code[:, ::2] | code[:, 1::2] << 4

    call = functools.partial(quantize, matrix, "e2m1", center="channel", packed=True)
    for n in counts:  # x is read four times: twice for the sums, for the amax, to encode
        arena.add("float4_e2m1fn packed, channel centre", call, threads=n, floor=0.25, moved=16.5,
                  peers=("centred FP4 in numpy",))  # fmt: skip
    arena.add("centred FP4 in numpy", in_numpy, moved=None)
