"""Cases replayed on the CUDA texts: the bits of the numba backend, and tensors that stay where the kernels run."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cuda_kernels import DeviceUnavailableError
from cuda_kernels._place import device
from qsim.backends.cuda import CudaBackend
from qsim.errors import BackendError
from qsim.sim import Env, get_defect, run
from qsim.sweep.config import load_study
from qsim.sweep.identity import canonical_json
from qsim.sweep.known import registries
from qsim.sweep.run import check_cells
from qsim.sweep.sweep import run_sweep
from tests.backends import EMULATED
from tests.places import played_device
from tests.unit.sim_cases import POLICY, WITH_GRADIENTS, case_of, env_of, recipe_of, tensors

SEEDS = (0, 1, 5)


def traced(case, backend):
    env = Env(load=tensors(SEEDS), backend=backend, recipe=case.recipe, policy=POLICY, lead=(len(SEEDS),))
    return run(case, env)


def assert_same_trace(expected, got):
    assert expected.records == got.records
    for name in ("inputs", "outputs"):
        mine, theirs = getattr(expected, name), getattr(got, name)
        assert list(mine) == list(theirs)
        for seq in mine:
            assert isinstance(theirs[seq], np.ndarray)
            assert mine[seq].tobytes() == theirs[seq].tobytes(), (name, seq)
    for seq, cast in expected.casts.items():
        other = got.casts[seq]
        assert cast.same_bits(other), seq
        assert cast.amax.tobytes() == other.amax.tobytes()
        for count in ("saturated", "flushed", "nan", "inf"):
            assert getattr(cast.counts, count).tolist() == getattr(other.counts, count).tolist()
    for seq, operands in expected.used.items():
        for a, b in zip(operands, got.used[seq], strict=True):
            assert (a.cast, a.descale.descale.tobytes()) == (b.cast, b.descale.descale.tobytes())


CASES = [("", "delayed", "e4m3"), ("", "current", "e2m1"), ("", "centred", "e5m2"), ("D01", "delayed", "e4m3"),
         ("D03", "centred", "e2m1"), ("D07", "centred", "e4m3"), ("D10", "delayed", "e5m2")]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("defect", "recipe", "fmt"), CASES)
def test_a_replayed_case_has_the_bits_of_the_cpu(backend, defect, recipe, fmt):
    found = get_defect(defect) if defect else None
    case = case_of(recipe_of(recipe, fmt), defect=found, body=WITH_GRADIENTS)
    case = found.rewrite(case) if found else case
    assert_same_trace(run(case, env_of(case, seeds=SEEDS)), traced(case, backend))


STUDY = """
schema = 1
[grid]
defects = ["correct", "high_precision", "D01", "D07"]
formats = ["e4m3"]
recipes = ["centred"]
windows = [1]
[replicas]
count = 3
[schedule]
steps = 3
layers = 2
[workload]
tokens = 2
outputs = 3
"""


@pytest.mark.usefixtures("gpp")
def test_a_small_sweep_on_the_emulated_kernels_equals_numba_to_the_byte(tmp_path):
    texts = []
    for name in ("numba", "emulated"):
        study = load_study(STUDY, registries(), [f"run.backend={name}"])
        outcome = run_sweep(study, out=tmp_path / name, workers=1)
        assert (outcome.complete, outcome.total) == (True, 4)
        texts.append(outcome.results_path.read_text())
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert ["emulated"] * 4 == [line["cell"].pop("backend") for line in lines[1]]
    for mine, theirs in zip(*lines, strict=True):
        del mine["cell"]["backend"], mine["case"], theirs["case"]  # a case is named by what computed it
        assert canonical_json(mine) == canonical_json(theirs)


def test_a_device_that_is_missing_is_one_message_before_any_cell(tmp_path):
    try:
        device()
    except DeviceUnavailableError:
        pass
    else:
        pytest.skip("there is a device")
    with pytest.raises(BackendError, match=r"backend cuda: .*python -m qsim doctor says what works here"):
        check_cells(load_study(STUDY, registries(), ["run.backend=cuda"]).cells())
    done = subprocess.run(
        [sys.executable, "-m", "qsim", "sweep", "--backend", "cuda", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qsim: backend cuda: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("gpp")
def test_tensors_stay_on_the_device_between_events(monkeypatch):
    monkeypatch.setattr("qsim.backends.cuda.nvrtc_version", lambda: "played")
    backend = CudaBackend(played_device(monkeypatch))
    cupy, events = backend.xp, []
    module = sys.modules["qsim.sim.step"]
    plain = module.apply_data
    monkeypatch.setattr(module, "apply_data", lambda *args: events.append(len(cupy.downloads)) or plain(*args))
    found = get_defect("D07")
    case = found.rewrite(case_of(recipe_of("centred"), defect=found, body=WITH_GRADIENTS))
    traced(case, backend)
    during = cupy.downloads[: events[-1]]
    # What a commit needs: amax and counts of a replica, a centre of its channels and the sums behind it. No tensor.
    channels = 6
    assert during
    assert max(np.prod(shape) for shape, _ in during) <= len(SEEDS) * channels
    assert len({shape for shape, _ in cupy.downloads[events[-1] :] if len(shape) == 3}) > 1  # and these at the end
    large = [shape for shape, _ in cupy.uploads if len(shape) == 3 and shape[1] > 1]
    assert len(large) == sum(type(event).__name__ == "Load" for event in case.schedule)
