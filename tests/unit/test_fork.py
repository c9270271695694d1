"""Forks while another thread compiles: the child neither waits for a lock that nobody releases, nor gets other bits."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from qsim.backends import numba_backend
from qsim.codec import jit

hold, jit.FORK_WAIT = float(sys.argv[1]), float(sys.argv[2])
merging = [value for value in vars(numba_backend).values() if isinstance(value, type(threading.Lock()))]
held, over = threading.Event(), threading.Event()

def compile_for_a_while():
    with jit._FIRST_CALL, global_compiler_lock:
        for lock in merging:
            lock.acquire()
        held.set()
        time.sleep(hold)
        over.set()

def on_another_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()

def amax():
    x = np.array([[1, -5, 3]], np.float32)
    return numba_backend.NumbaBackend().observe(x, None, lead=0, mean_axes=None).amax

threading.Thread(target=compile_for_a_while, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(40)  # what hangs is killed, and seen
    os._exit(0 if amax() == on_another_thread(amax) == 5 else 1)
waited, status = over.is_set(), os.waitpid(child, 0)[1]
locks = jit._FIRST_CALL, global_compiler_lock._lock
print(waited, status, [on_another_thread(lambda: lock.acquire(blocking=False)) for lock in locks])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize(
    ("hold", "wait", "expected"),
    [
        pytest.param("0.3", "30", "True 0 [True, True]", id="a compile that ends"),
        pytest.param("60", "0.1", "False 0 [False, False]", id="one that does not end in time"),
    ],
)
def test_a_child_forked_during_a_compile_compiles_too(tmp_path, hold, wait, expected):
    """The fork waits for the compile and leaves the locks as they were; the child has them free on all its threads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, hold, wait],
        env={**os.environ, "QSIM_CACHE_DIR": str(tmp_path), "NUMBA_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (0, expected + "\n") == (done.returncode, done.stdout), done.stderr
