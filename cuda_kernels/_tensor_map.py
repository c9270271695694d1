"""What a TMA load reads: a matrix of bytes in memory, a box of it, a swizzle, as 128 bytes. Knows no kernel.

On a device the driver writes them (cuTensorMapEncodeTiled: the form is its own and not told); under emulation this
module does, in words of 64 bits that ``wgmma_emulated.cuh`` reads. Both refuse the same matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels import DeviceUnavailableError

SWIZZLE_128B = 3
"""As the driver counts: CU_TENSOR_MAP_SWIZZLE_128B."""
_MARK = 0x50414D4D49535121
_BYTES = 128
_ALIGN = 64


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """A kernel's parameter by value. words: uint64 [16] at a 64-byte address; array: what they point to, kept alive."""

    words: Any
    array: Any

    @property
    def value(self) -> Any:
        """One numpy element of 128 bytes: how CuPy takes a struct by value."""
        return self.words.view(f"V{_BYTES}")


def emulated_map(array: Any, box: tuple[int, int]) -> TensorMap:
    """uint8 array [rows, columns], columns together, for the emulation; box: rows and columns of one load."""
    address, extents, stride = _matrix(array, array.ctypes.data, box)
    words = _words()
    words[:7] = address, *extents, stride, box[1] | box[0] << 32, SWIZZLE_128B, _MARK
    return TensorMap(words, array)


def device_map(array: Any, box: tuple[int, int]) -> TensorMap:
    """The same by the driver, of a CuPy array. DeviceUnavailableError where the driver does not write it."""
    address, extents, stride = _matrix(array, array.data.ptr, box)
    try:
        from cuda.bindings import driver
    except ImportError as cause:
        raise DeviceUnavailableError("cuda-bindings is missing: install the extra cuda13 (or cuda12)") from cause
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [wide(extent) for extent in extents],
        [wide(stride)],
        [narrow(box[1]), narrow(box[0])],
        [narrow(1), narrow(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(SWIZZLE_128B),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceUnavailableError(
            f"the driver wrote no tensor map ({status.name}) of uint8 {tuple(array.shape)}, rows {stride} bytes apart"
        )
    words = _words()
    words[:] = [int(word) for word in made.opaque]
    return TensorMap(words, array)


def _matrix(array: Any, address: int, box: tuple[int, int]) -> tuple[int, tuple[int, int], int]:
    """(address, extents inner first, bytes from row to row); ValueError for what TMA cannot load."""
    rows, columns = (int(size) for size in array.shape)
    stride = int(array.strides[0]) if rows > 1 else -(-columns // 16) * 16
    rules = {
        "a matrix of uint8 whose columns lie together": array.dtype == np.uint8
        and (columns == 1 or array.strides[1] == 1),
        "extents of 1 to 2^31 - 1": 0 < min(rows, columns) <= max(rows, columns) < 1 << 31,
        "an address that is a multiple of 16": address % 16 == 0,
        "rows a multiple of 16 bytes apart": stride % 16 == 0 and columns <= stride < 1 << 40,
        "a box of 1 to 256 rows of 128 bytes": 0 < box[0] <= 256 and box[1] == 128,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(
                f"TMA takes {rule}; the array is {array.dtype} {tuple(array.shape)} of strides {array.strides} "
                f"at {address:#x}, the box {box}"
            )
    return address, (columns, rows), stride


def _words() -> Any:
    """Zeros at an address that the driver takes."""
    room = np.zeros(_BYTES + _ALIGN, np.uint8)
    start = -room.ctypes.data % _ALIGN
    return room[start : start + _BYTES].view(np.uint64)
