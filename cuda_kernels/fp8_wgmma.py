"""Launcher of ``fp8_wgmma.cu``: sums of FP8 products by wgmma, promoted and scaled by blocks. Knows no epilogue.

NOT YET RUN ON HARDWARE: compiled for sm_90a, run under emulation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._chains import Scales, chains, scale_arguments
from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import aligned
from cuda_kernels._place import Place, check_array

THREADS = 384
SIDE = 128
DEPTH = 128
STEP = 32
"""k of one wgmma: what chains and parts are multiples of."""
MODEL = "hopper_wgmma"
"""The model in qsim.gemm.MODELS whose bits a chain has."""
STAGES = 4
SHARED = 1023 + STAGES * 2 * SIDE * DEPTH + 1024 + STAGES * 16
"""Bytes: the way to a multiple of 1024, the stages, zeros, two barriers a stage."""
FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
PRELUDE = ("block_fma.cuh", "wgmma_emulated.cuh", "wgmma.cuh", "promote.cuh")
FP8_WGMMA = {
    (a, b): Kernel("fp8_wgmma.cu", f"qsim_fp8_wgmma_{FORMATS[a]}_{FORMATS[b]}", prelude=PRELUDE, arches=("sm_90a",))
    for a in FORMATS
    for b in FORMATS
}


def fp8_wgmma(
    place: Place,
    a: Any,
    b: Any,
    *,
    formats: tuple[str, str],
    promote_every: int | None = None,
    split_k: int = 1,
    scales: Scales | None = None,
) -> Any:
    """float32 [M, N] of a [M, K] and b [N, K], uint8 codes of ``formats`` (``FORMATS``), any strides.

    A chain is the sum over its k of a[i, k] * b[j, k] as ``MODEL`` adds: from +0, 32 products a step, in ascending k.
    K is one chain, or chains of promote_every k (a multiple of 32), each partial p joining the sum in ascending k:

        acc = RN(acc + p), or with scales acc = RN(p RN(s_a s_b) + acc), one rounding; acc begins with +0

    scales: (s_a, (rows, k), s_b, (rows, k)), float32 [ceil(M / rows), ceil(K / k)] and [ceil(N / rows), ceil(K / k)],
    either pair None and None; of a chain that begins at k', output i takes s_a[i // rows, k' // k]. A chain is as long
    as the narrower block, or promote_every, which must divide it. split_k: parts of K, of whole blocks, with sums of
    their own, added in float32 in ascending k.
    NaN is 7fffffff. DeviceUnavailableError for a device other than sm_90a; TypeError or ValueError for other dtypes,
    shapes, formats or cuts.
    """
    if formats not in FP8_WGMMA:
        raise ValueError(f"formats {formats}; wgmma takes pairs of {', '.join(FORMATS)}")
    check_array(place, "a", a, "uint8")
    check_array(place, "b", b, "uint8")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not [M, K] and [N, K]")
    shape, depth = (int(a.shape[0]), int(b.shape[0])), int(a.shape[1])
    cut = chains(depth, STEP, promote_every=promote_every, split_k=split_k, scales=scales)
    arguments = scale_arguments(place, scales, shape, depth)
    if 0 in (*shape, depth):
        return place.xp.zeros(shape, place.xp.float32)
    out = place.empty(shape, "float32")
    maps = [place.tensor_map(_loadable(place, codes), (SIDE, DEPTH)) for codes in (a, b)]
    tiles = -(-shape[0] // SIDE) * -(-shape[1] // SIDE)
    for first, last in cut.parts:
        numbers = (np.int32(value) for value in (*shape, first, last, cut.run, first > 0))
        place.tiles(FP8_WGMMA[formats], tiles, THREADS, (*maps, out, *numbers, *arguments), dynamic=SHARED)
    return out


def _loadable(place: Place, codes: Any) -> Any:
    """The codes in rows that TMA takes: from addresses that are multiples of 16; a copy where they are not."""
    rows, depth = codes.shape
    pitch = -(-depth // 16) * 16
    if pitch == depth:
        return aligned(place.xp, codes)
    room = aligned(place.xp, place.empty((rows, pitch), "uint8"))[:, :depth]
    room[...] = codes
    return room
