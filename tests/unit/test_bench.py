"""The benchmark's arithmetic, with a clock that is made up: no test here depends on speed."""

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from qsim.cli import app
from qsim.errors import UsageError
from qsim.report import bench, bench_gemm


@pytest.fixture
def clock(monkeypatch):
    """np.copyto takes 2 s, everything else 4 s on one thread and 2 s on more; the first round is ten times slower."""
    calls = {}

    def timed(contender):
        key = contender.what, contender.threads
        calls[key] = calls.get(key, 0) + 1
        contender.call()
        seconds = 2.0 if contender.what == bench.COPY else 4.0 / contender.threads
        return seconds * (10 if calls[key] == 1 else 1)

    monkeypatch.setattr(bench, "_timed", timed)
    monkeypatch.setattr("qsim.codec.threads._chosen", 2)
    monkeypatch.setattr(bench, "_torchao_casts", lambda matrix: iter(()))  # minutes a call
    monkeypatch.setattr(bench_gemm, "_timed", lambda c: (c.call(), 2.0 if c.what.startswith("numpy") else 4.0)[1])
    return calls


def test_ratios_are_speeds_over_np_copyto_and_the_first_round_does_not_count(clock):
    rows = {(row.what, row.threads): row for row in bench.bench_rows(mebi=1, rounds=2)}
    encode = rows["encode float8_e4m3fn", 1]
    assert (4.0, 0.5, 0.8) == (encode.seconds, encode.ratio, encode.floor)
    assert 4 * (1 << 20) / 4.0 / 1e9 == encode.gigabytes
    assert 1.0 == rows["encode float8_e4m3fn", 2].ratio
    assert 1.0 == rows[bench.COPY, 1].ratio
    assert {3} == set(clock.values())


def test_a_peer_is_compared_on_as_many_threads_or_on_one(clock):
    rows = {(row.what, row.threads): row for row in bench.bench_rows(mebi=1, rounds=1)}
    assert 2.0 == rows["encode float8_e5m2", 2].peers["ml_dtypes float8_e5m2"]
    assert 1.0 == rows["encode float8_e5m2", 1].peers["ml_dtypes float8_e5m2"]
    if importlib.util.find_spec("torch") is not None:
        assert 1.0 == rows["encode float8_e5m2", 2].peers["torch float8_e5m2"]


def test_every_promise_of_the_table_is_measured(clock):
    rows = bench.bench_rows(mebi=1, rounds=1)
    promised = {row.what: row.floor for row in rows if row.floor is not None and row.threads == 1}
    assert {0.8, 0.7, 0.5, 0.4, 0.25} <= set(promised.values())
    assert {1.5} <= {row.floor for row in rows if row.threads == 2}
    for name in (
        "float4_e2m1fn packed",
        "mxfp4_rceil packed",
        "nvfp4_te packed",
        "decode",
        "channel centre",
        "one pass",
    ):
        assert any(name in what for what in promised), name


def test_bytes_an_element_are_counted_by_passes_and_left_blank_where_nobody_knows(clock, monkeypatch):
    monkeypatch.setattr(bench, "_torchao_casts", lambda matrix: iter([("nvfp4_te", lambda: None)]))
    rows = bench.bench_rows(mebi=1, rounds=1)
    moved = {row.what: row.bytes_per_element for row in rows}
    assert (8.0, 5.0, 8.5) == tuple(moved[n] for n in (bench.COPY, bench.CEILING, "float4_e2m1fn packed, with scales"))
    assert 4 * 4 + 0.5 == moved["float4_e2m1fn packed, channel centre"]
    assert (None, None) == (moved["centred FP4 in numpy"], moved["torchao nvfp4_te"])
    cells = bench.bench_table(rows).columns[5].cells
    assert {row.what: cell for row, cell in zip(rows, cells, strict=True)}["centred FP4 in numpy"] == ""


def test_the_command_prints_a_table_and_json(clock):
    runner = CliRunner()
    shown = runner.invoke(app, ["bench", "--size", "1", "--rounds", "1"])
    assert 0 == shown.exit_code, shown.output
    assert "encode float8_e4m3fn" in shown.output
    assert "truncation to a byte" in shown.output
    read = json.loads(runner.invoke(app, ["bench", "--size", "1", "--rounds", "1", "--json"]).stdout)
    assert bench.COPY == read["codecs"][0]["what"]
    assert "exact float8_e4m3fn" in {row["what"] for row in read["products"]}
    only = runner.invoke(app, ["bench", "--size", "1", "--rounds", "1", "--only", "products", "--side", "64", "--json"])
    assert [] == json.loads(only.stdout)["codecs"]
    assert isinstance(runner.invoke(app, ["bench", "--only", "gemm"]).exception, UsageError)


def test_products_are_compared_with_the_peer_of_their_shape(clock):
    rows = {(row.what, row.shape): row for row in bench_gemm.product_rows(side=64, rounds=2)}
    square, half = (64, 64, 64), (32, 32, 32)
    assert (0.5, 0.85) == (rows["exact float8_e4m3fn", square].ratio, rows["exact float8_e4m3fn", square].floor)
    assert "numpy float32 matmul" == rows["exact float4_e2m1fn, packed", square].peer
    assert 0.2 == rows["exact float8_e5m2", half].floor
    assert "float64 BLAS" in rows["exact float8_e5m2", half].path
    assert 64**3 / 4.0 / 1e9 == rows["exact nvfp4_te, packed", square].gmacs
    assert 0.8 == rows["model hopper_wgmma", (256, 256, 1024)].floor
    shown = bench_gemm.product_table(tuple(rows.values()))
    assert len(rows) == shown.row_count
    with pytest.raises(UsageError, match="at least 64"):
        bench_gemm.product_rows(side=32)


def test_sizes_below_one_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        bench.bench_rows(mebi=0)
