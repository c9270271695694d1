"""The isolation walk, what makes gradients spike, and logs put side by side."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from qsim.errors import UsageError
from qsim.report.article import walk_data, walk_lines
from qsim.training.article import CONTROLS, NOTHING, SUSPECT, first_divergence, mechanism, walk
from qsim.training.config import QuantParams, TrainConfig
from qsim.training.join import joined
from qsim.training.run import train
from tests.unit.training_cases import small

SMALL_SUSPECT = small(
    quant=QuantParams(linear=("input",), window=1, attention=("q", "k"), attention_fmt="float8_e4m3fn"),
    loop={"steps": 8, "matched": (0, 1)}, defect="D03",
)  # fmt: skip


def test_the_walk_tells_the_casts_from_everything_else() -> None:
    found = {one.control: one for one in walk(SMALL_SUSPECT, (1, 2))}
    assert ["", *CONTROLS] == list(found)
    assert found["low_precision_off"].differing == 0
    assert 0 < found[""].differing == found["matched_points"].differing
    assert 0 < found["high_precision_attention"].differing
    assert CONTROLS["low_precision_off"].goes == found["low_precision_off"].verdict
    assert CONTROLS["matched_points"].stays == found["matched_points"].verdict
    assert found[""].first.startswith("step 0 ")
    # matched points change nothing: it is the suspect's own run
    assert found[""].digest == found["matched_points"].digest != found["accumulation"].digest


def test_the_article_s_own_size_spikes_and_no_control_but_one_takes_the_spikes_away() -> None:
    config = msgspec.structs.replace(SUSPECT, accumulation="blas")
    config = msgspec.structs.replace(config, loop=msgspec.structs.replace(config.loop, steps=6, matched=(0,)))
    found = {one.control: one for one in walk(config, (0,), ("low_precision_off", "high_precision_attention"))}
    assert 10 < found[""].largest[0]
    assert found["low_precision_off"].largest[0] < 3
    assert 3 < found["high_precision_attention"].largest[0]
    assert CONTROLS["low_precision_off"].goes == found["low_precision_off"].verdict


def test_a_control_by_another_name_is_refused() -> None:
    with pytest.raises(UsageError, match='control "tf32" is unknown; known: accumulation, low_precision_off'):
        walk(SMALL_SUSPECT, (0,), ("tf32",))


def test_a_reader_and_a_program_are_told_the_same() -> None:
    found = walk(SMALL_SUSPECT, (1,), ("accumulation", "matched_points"))
    lines = list(walk_lines(found))
    assert 2 == len(lines)
    assert lines[0].startswith("accumulation: ")
    assert lines[1].endswith(f"(first: {found[2].first}).")
    data = walk_data(found, (1,))
    assert ["", "accumulation", "matched_points"] == [run["control"] for run in data["runs"]]
    assert [1] == data["seeds"]


def test_the_first_divergence_is_a_product_whose_input_agrees() -> None:
    log = train(msgspec.structs.replace(SMALL_SUSPECT, defect="D02"), (1,))
    step, point = first_divergence(log.matched).removeprefix("step ").split()
    place, kind = point.rsplit(".", 1)
    before = {"qkv": "norm_attn", "up": "norm_ffn", "down": "activation"}[kind]
    by_name = {(p.step, p.point): p for p in log.matched}
    assert by_name[int(step), f"{place}.{before}"].same == (True,)
    assert by_name[int(step), point].same == (False,)
    assert "" == first_divergence(train(msgspec.structs.replace(SMALL_SUSPECT, defect="correct"), (1,)).matched)


def test_rows_of_probabilities_add_up_to_one_but_for_a_saved_log_sum_exp_of_other_logits() -> None:
    suspect, correct, whole = mechanism(SMALL_SUSPECT, 1).values()
    assert (8, 2, 1) == suspect.largest.shape
    np.testing.assert_allclose(correct.largest, 1, rtol=1e-5)
    np.testing.assert_allclose(whole.largest, 1, rtol=1e-5)
    assert 1.001 < suspect.largest.max()


def other(**fields: object) -> TrainConfig:
    return small(loop={"steps": 2, "matched": (0,)}, **fields)


def test_logs_of_seeds_side_by_side_are_the_log_of_all_seeds() -> None:
    config = other(defect="D03")
    together, parts = train(config, (3, 4, 5)), [train(config, (3,)), train(config, (4, 5))]
    found = joined(parts)
    assert together.seeds == found.seeds
    assert together.steps == found.steps
    assert (together.scales, together.digest, together.final_loss) == (found.scales, found.digest, found.final_loss)
    assert [p.same for p in together.matched] == [p.same for p in found.matched]
    assert "+" in found.matched[0].digest_forward


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (other(defect="D02"), "verdicts"),
        (small(loop={"steps": 3, "matched": (0,)}, defect="D03"), "steps"),
        (small(loop={"steps": 2, "matched": (1,)}, defect="D03"), "matched points"),
        (small(loop={"steps": 2, "matched": (0,)}, defect="D03", quant=QuantParams(linear=("weight",))), "owners"),
    ],
)
def test_logs_of_other_cases_are_not_put_side_by_side(second: TrainConfig, what: str) -> None:
    first = train(other(defect="D03"), (1,))
    with pytest.raises(UsageError, match=f"have other {what}"):
        joined([first, train(second, (2,))])
    with pytest.raises(UsageError, match="at least one"):
        joined([])


def test_nothing_follows_from_a_run_that_shows_nothing() -> None:
    quiet = small(quant=SMALL_SUSPECT.quant, loop={"steps": 1, "matched": (0,)})
    found = walk(quiet, (1,), ("accumulation", "low_precision_off"))
    assert [NOTHING, NOTHING] == [one.verdict for one in found[1:]]
