"""Digests of the article's study that every machine must reproduce.

One run of each protocol of ``studies/article.toml``, seed 0, its first steps: sha256 over loss, gradient norm and skip
of every step. A change of any bit in text, checkpoint, nodes, products, codecs, recipes or optimizer shows here; one
that is meant is written into the CHANGELOG with the new digests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsim._paths import studies_dir
from qsim.sweep.config import read_study
from qsim.sweep.known import registries
from qsim.sweep.training.cell import TrainingCell
from qsim.sweep.training.run import run_cell

GOLDEN = Path(__file__).parent / "article.json"
FEWER = ["loop.steps=2", "loop.matched=1", "replicas.count=1"]


def cells() -> dict[str, TrainingCell]:
    """Setting and protocol -> its cell of seed 0, two steps long."""
    found = read_study(studies_dir() / "article.toml", registries(), FEWER).cells()
    return {f"{cell.setting}: {cell.config.defect}": cell for cell in found if isinstance(cell, TrainingCell)}


def digest(cell: TrainingCell) -> str:
    """Of its one seed."""
    return run_cell(cell).log.digest[0]


def test_every_protocol_of_the_study_has_a_golden_digest() -> None:
    assert set(cells()) == set(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("name", sorted(cells()))
def test_a_run_has_its_golden_digest(name: str) -> None:
    assert json.loads(GOLDEN.read_text())[name] == digest(cells()[name])
