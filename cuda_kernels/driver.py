"""Whether this machine has an NVIDIA driver and a device, asked of the driver itself. Needs no CuPy.

``python -m cuda_kernels.driver`` says so and exits with 1 where there is none: before anything large is installed.
"""

from __future__ import annotations

import ctypes
import sys


def found() -> tuple[int, str]:
    """(number of devices, why there is none or what there is)."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0, f"no NVIDIA driver on this machine ({name} was not found)"
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return 0, "the NVIDIA driver finds no device"
    driver.cuDriverGetVersion(ctypes.byref(version))
    return count.value, f"{count.value} device(s), driver of CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def main() -> int:
    """Print what was found; 1 without a device."""
    count, words = found()
    print(words if count else f"{words}: make gpu PLACE=played is a dry run without one", file=sys.stderr)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
