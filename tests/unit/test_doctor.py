"""doctor: every check reports, none raises, and only what qsim cannot do without makes it fail."""

import json

import pytest
from typer.testing import CliRunner

import cuda_kernels._nvrtc
import cuda_kernels.host
from cuda_kernels import KernelBuildError
from qsim.cli import app
from qsim.report import doctor

RUN = CliRunner()


def by_name(found=None):
    return {f.what: f for f in (found or doctor.findings())}


def test_a_healthy_machine_passes_and_says_what_it_has():
    shown = RUN.invoke(app, ["doctor"])
    assert 0 == shown.exit_code, shown.output
    for word in ("Python", "numba", "cache folder", "BLAS", "CUDA device"):
        assert word in shown.output
    read = json.loads(RUN.invoke(app, ["doctor", "--json"]).stdout)
    assert read["works"] is True
    assert {"what", "fine", "found", "advice", "needed"} == set(read["findings"][0])
    assert read["gpu"] is any(f["what"] == "CUDA device" and f["fine"] for f in read["findings"])


def test_what_is_missing_and_not_needed_is_advice(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)

    def no_nvrtc():
        raise KernelBuildError("NVRTC was not found: install the extra\nmore")

    monkeypatch.setattr(cuda_kernels._nvrtc, "_nvrtc", no_nvrtc)
    found = by_name()
    assert not found["C++ compiler"].fine
    assert "install g++" in found["C++ compiler"].advice
    assert "NVRTC was not found: install the extra" == found["NVRTC"].found
    assert 0 == RUN.invoke(app, ["doctor"]).exit_code


def test_what_is_needed_and_broken_fails(monkeypatch):
    real = doctor.importlib.import_module

    def broken(name):
        if name == "scipy":
            raise ImportError("no scipy here")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert "no scipy here" in by_name()["scipy"].found
    result = RUN.invoke(app, ["doctor"])
    assert 1 == result.exit_code
    assert "FAIL" in result.output
    assert json.loads(RUN.invoke(app, ["doctor", "--json"]).stdout)["works"] is False


def test_a_check_that_raises_is_a_finding(monkeypatch):
    def _compiler():
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "_compiler", _compiler)
    found = by_name()
    assert (False, "RuntimeError: boom") == (found["compiler"].fine, found["compiler"].found)
    assert "CUDA device" in found


def test_a_cache_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QSIM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = by_name()["cache folder"]
    assert not found.fine
    assert "cannot be written" in found.advice


@pytest.mark.parametrize(("capability", "fine"), [((7, 5), False), ((9, 0), True)])
def test_a_device_is_described_and_an_old_one_refused(monkeypatch, capability, fine):
    class Runtime:
        @staticmethod
        def getDeviceCount():  # noqa: N802 - CuPy's name
            return 1

        @staticmethod
        def getDeviceProperties(index):  # noqa: N802 - CuPy's name
            return {"name": b"Some GPU", "major": capability[0], "minor": capability[1], "totalGlobalMem": 8 << 30}

    fake = type("cupy", (), {"cuda": type("cuda", (), {"runtime": Runtime})})
    monkeypatch.setattr("cuda_kernels._place.cupy_with_device", lambda: fake)
    found = by_name()["CUDA device"]
    assert fine is found.fine
    assert f"0: Some GPU, sm_{capability[0]}{capability[1]}, 8192 MiB" == found.found
