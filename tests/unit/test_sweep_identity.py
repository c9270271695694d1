"""The identity of a case and the exact text of a record."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from qsim.errors import InputError, StudyError
from qsim.sweep import identity
from qsim.sweep.cell import Cell, CellRecord
from qsim.sweep.identity import case_id, decode_cell, decode_record, encode_cell, encode_record, record_digest


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("fake_cells")


def _with(cell: Cell, **changes: object) -> Cell:
    return msgspec.structs.replace(cell, **changes)


def _with_workload(cell: Cell, **changes: object) -> Cell:
    return _with(cell, workload=msgspec.structs.replace(cell.workload, **changes))


def test_a_case_id_is_pinned_so_that_old_journals_stay_readable(fakes: ModuleType) -> None:
    assert case_id(fakes.cell("D01", window=16, mean_shift=0.5)) == "8faf5d3b863d4fb5227c"


def test_the_path_of_the_tensors_is_no_part_of_a_case_but_their_digest_is(fakes: ModuleType) -> None:
    here, there = fakes.cell(tensors="/here/a.safetensors"), fakes.cell(tensors="b.safetensors")
    assert case_id(here) == case_id(there)
    assert case_id(here) != case_id(_with_workload(here, tensors_digest="d2" * 32))


def test_every_other_parameter_is_part_of_a_case(fakes: ModuleType) -> None:
    base = fakes.cell()
    others = []
    for name in Cell.__struct_fields__:
        value = getattr(base, name)
        if isinstance(value, msgspec.Struct):
            for inner in set(value.__struct_fields__) - {"tensors"}:
                new = ("twice",) if inner == "features" else _another(getattr(value, inner))
                changed = msgspec.structs.replace(value, **{inner: new})
                others.append(_with(base, **{name: changed}))
        else:
            others.append(_with(base, **{name: _another(value)}))
    ids = {case_id(cell) for cell in [base, *others]}
    assert len(ids) == 1 + len(others) == 1 + 10 + 8 + 8


def _another(value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return (*value, 3)
    raise AssertionError(value)


def test_one_number_in_three_spellings_is_one_case(fakes: ModuleType) -> None:
    ids = {case_id(_with_workload(fakes.cell(), mean_shift=v)) for v in (3e6, 3000000, 3000000.0, np.float32(3e6))}
    assert len(ids) == 1
    assert case_id(_with(fakes.cell(), window=np.int64(16))) == case_id(_with(fakes.cell(), window=16))


def test_numbers_that_print_alike_are_two_cases(fakes: ModuleType) -> None:
    above = math.nextafter(0.1, 1.0)
    assert case_id(fakes.cell(mean_shift=0.1)) != case_id(fakes.cell(mean_shift=above))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_parameters_that_name_no_case_are_refused(fakes: ModuleType, value: float) -> None:
    with pytest.raises(StudyError, match="names no case"):
        case_id(fakes.cell(mean_shift=value))


@pytest.mark.parametrize("changes", [{"window": 1.5}, {"window": True}, {"window": "1"}, {"reproducible": 1}])
def test_a_parameter_of_another_type_is_refused(fakes: ModuleType, changes: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"cell.{next(iter(changes))} is"):
        case_id(_with(fakes.cell(), **changes))


def test_a_cell_whose_tensors_have_no_digest_is_refused(fakes: ModuleType) -> None:
    with pytest.raises(StudyError, match="tensors_digest is empty"):
        case_id(_with_workload(fakes.cell(), tensors_digest=""))


def test_another_engine_makes_other_cases(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = case_id(fakes.cell())
    monkeypatch.setattr(identity, "ENGINE", identity.ENGINE + 1)
    assert case_id(fakes.cell()) != before


def test_a_record_comes_back_to_the_bit() -> None:
    awkward = (math.inf, -math.inf, 5e-324, -0.0, 0.1, 1.7976931348623157e308, math.nan)
    record = CellRecord(
        status="ok",
        note='ü "quoted"\n',
        broken=("I1", "I4"),
        rel_error_replica=awkward,
        rel_error_max=math.inf,
    )
    back = decode_record(encode_record(record))
    assert [v.hex() for v in awkward] == [v.hex() for v in back.rel_error_replica]
    assert msgspec.structs.replace(record, rel_error_replica=()) == msgspec.structs.replace(back, rel_error_replica=())
    assert encode_record(record) == encode_record(back)


def test_the_text_of_a_record_is_canonical() -> None:
    text = encode_record(CellRecord(status="ok", rel_error_max=math.inf, rel_error_median=np.float64(0.5)))
    assert '"rel_error_max":"inf","rel_error_median":"0x1.0000000000000p-1","rel_error_p99":"0x0.0p+0"' in text
    keys = [part.split('"')[0] for part in text.replace("{", ",").split(',"')[1:]]
    assert keys == sorted(keys) == sorted(CellRecord.__struct_fields__)
    assert " " not in text


def test_numpy_scalars_are_the_numbers_they_hold() -> None:
    ours = CellRecord(status="ok", commits=3, k=0.25)
    theirs = CellRecord(status="ok", commits=np.int32(3), k=np.float32(0.25))  # type: ignore[arg-type]
    assert encode_record(ours) == encode_record(theirs)
    assert record_digest(ours) == record_digest(theirs)


def test_a_changed_bit_changes_the_digest() -> None:
    first = CellRecord(status="ok", k=0.1)
    assert record_digest(first) != record_digest(CellRecord(status="ok", k=math.nextafter(0.1, 1.0)))
    assert record_digest(first) != record_digest(CellRecord(status="ok", k=-0.1))


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"status":"ok"}', '{"status":'])
def test_a_text_that_is_no_record_is_unreadable_input(text: str) -> None:
    with pytest.raises(InputError, match="no CellRecord in"):
        decode_record(text)


def test_a_record_with_a_wrong_type_is_unreadable_input() -> None:
    text = encode_record(CellRecord(status="ok", commits=3))
    with pytest.raises(InputError, match="Expected `int`"):
        decode_record(text.replace('"commits":3', '"commits":"3"'))


def test_a_cell_comes_back_with_the_path_of_its_tensors(fakes: ModuleType) -> None:
    cell = _with_workload(fakes.cell(tensors="/x/y"), outlier_steps=(1, 5), mean_shift=-0.25)
    assert decode_cell(encode_cell(cell)) == cell
