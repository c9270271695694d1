"""The encoder of thresholds against the oracle, the fast one against both, and the exhaustive run's journal."""

import json

import numpy as np
import pytest

import tests.exhaustive as exhaustive
from qsim.codec import encode
from qsim.codec.oracle import encode_by_policy
from qsim.conformance.codec import critical_values
from qsim.conformance.compare import assert_codes_equal
from qsim.conformance.steps import steps_of
from qsim.formats import FORMATS, POLICIES

ALL = [(fmt, policy) for fmt in FORMATS.values() for policy in POLICIES.values()]
IDS = [f"{fmt.name}-{policy.name}" for fmt, policy in ALL]


def code_of_each(steps, bits):
    """Codes of scattered patterns, by the same table that gives ranges."""
    return steps.codes[np.searchsorted(steps.starts, bits.astype(np.int64), side="right") - 1]


@pytest.mark.parametrize(("fmt", "policy"), ALL, ids=IDS)
def test_steps_equal_the_oracle_at_every_value_midpoint_and_neighbour(fmt, policy):
    x = critical_values(fmt)
    expected = np.array([encode_by_policy(float(v), fmt, policy) for v in x], np.uint8)
    assert_codes_equal(expected, code_of_each(steps_of(fmt, policy), x.view(np.uint32)), fmt, inputs=x)


@pytest.mark.parametrize(("fmt", "policy"), ALL, ids=IDS)
def test_the_encoder_equals_the_steps_on_a_stratified_million(fmt, policy):
    """One pattern of every 4096 neighbours, and the two on either side of every step."""
    steps = steps_of(fmt, policy)
    rng = np.random.default_rng(2024)
    strata = np.arange(1 << 20, dtype=np.uint64) * 4096 + rng.integers(0, 4096, 1 << 20, dtype=np.uint64)
    edges = np.concatenate([steps.starts - 1, steps.starts, steps.starts + 1])[1:] % (1 << 32)
    bits = np.concatenate([strata, edges.astype(np.uint64)]).astype(np.uint32)
    assert_codes_equal(code_of_each(steps, bits), encode(bits.view(np.float32), fmt, policy=policy), fmt)


def test_a_range_of_patterns_has_the_codes_of_its_members():
    fmt, policy = FORMATS["float8_e5m2"], POLICIES["cuda_nosat"]
    steps = steps_of(fmt, policy)
    for start in (0, 0x37800000 - 5, 0x7F800000 - 3, 0x80000000 - 2, 0xFFFFFFFF - 9):
        bits = np.arange(start, start + 10, dtype=np.uint32)
        assert code_of_each(steps, bits).tolist() == steps.codes_of(start, start + 10).tolist()


def test_one_wrong_code_is_found_and_named(monkeypatch, tmp_path, capsys):
    def broken(x, fmt, **options):
        codes = encode(x, fmt, **options)
        codes[x.view(np.uint32) == 0x00012345] ^= 1
        return codes

    monkeypatch.setattr(exhaustive, "encode", broken)
    journal = tmp_path / "journal.jsonl"
    assert 1 == exhaustive.main(["--journal", str(journal), "--only", "e4m3fn cuda against steps", "--shards", "1"])
    assert "pattern 00012345" in capsys.readouterr().err
    assert "" == journal.read_text()


def test_a_finished_shard_is_not_run_again_unless_the_sources_changed(monkeypatch, tmp_path):
    journal = tmp_path / "journal.jsonl"
    arguments = ["--journal", str(journal), "--only", "e2m1fn cuda against steps", "--shards", "1"]
    assert 0 == exhaustive.main(arguments)
    (line,) = journal.read_text().splitlines()
    journal.write_text(line + '\n{"job": "torn')
    ran = []
    monkeypatch.setattr(exhaustive, "check_shard", lambda job, shard, encoder: ran.append(shard) or "")
    assert 0 == exhaustive.main(arguments)
    assert [] == ran
    journal.write_text(json.dumps(json.loads(line) | {"digest": "another"}) + "\n")
    assert 0 == exhaustive.main(arguments)
    assert [0] == ran
