"""Tokens: what comes back, what is refused, and that a token goes on to mean the same run."""

from __future__ import annotations

import hashlib
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsim.errors import QsimError, UsageError
from qsim.explore import SEMANTICS, Codes, Commits, Space, Token, followed, interleaved, token_of
from qsim.sim import RULES, SCOPES, Cadence, records_of

LOST = Token(space=Space(commit=Commits.SPLIT), choices=(0, 0, 1, 1, 1, 0), invariant="I3")
TEXT = "x1~2.1.1.layer.layer.split.own.microbatch.seed_correct.delayed.none.input~0x2-1x3-0~I3~f2851cac"

SPACES = st.builds(
    Space,
    workers=st.integers(1, 8),
    steps=st.integers(1, 6),
    layers=st.integers(1, 6),
    scope=st.sampled_from(sorted(SCOPES)),
    declared=st.sampled_from(["", *sorted(SCOPES)]),
    commit=st.sampled_from([mode for mode in Commits if not mode.ranked]),
    codes=st.sampled_from(Codes),
    preset=st.sampled_from(["seed_correct", "seed_defective", "current"]),
    defect=st.sampled_from(["none", "D01", "D07", "D10"]),
    part=st.sampled_from(["input", "linear", "block"]),
    unit=st.sampled_from([None, Cadence.MICROBATCH, Cadence.STEP]),
)
CHOICES = st.lists(st.integers(0, 7), max_size=60).map(tuple)
TOKENS = st.builds(Token, space=SPACES, choices=CHOICES, invariant=st.sampled_from(sorted(RULES)))


def signed(body: str) -> str:
    """A token with a checksum that is right, whatever stands in it."""
    return f"{body}~{hashlib.sha256(body.encode()).hexdigest()[:8]}"


def test_the_token_of_the_lost_commit_is_written_in_plain_words() -> None:
    assert signed(TEXT.rsplit("~", 1)[0]) == LOST.text()
    assert TEXT == LOST.text()


@given(TOKENS)
def test_a_token_comes_back_whole_and_needs_no_quoting_in_a_url(token: Token) -> None:
    text = token.text()
    assert token == token_of(text)
    assert token == token_of(f"  {text}\n")
    assert set() == set(text) - set(string.ascii_letters + string.digits + "-._~")


@settings(max_examples=200)
@given(TOKENS, st.data())
def test_a_token_with_another_character_or_without_its_end_is_refused(token: Token, data: st.DataObject) -> None:
    text = token.text()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from([c for c in "0a~-x" if c != text[at]]))
    for broken in (text[:at] + other + text[at + 1 :], text[:at]):
        with pytest.raises(UsageError, match="token"):
            token_of(broken)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT[:-1], "changed or cut short: it ends in \"f2851ca\", its text gives f2851cac"),
        (TEXT.replace("split", "atomic"), "changed or cut short"),
        ("", "is none: it starts with x1~"),
        ("I3", "is none: it starts with x1~"),
        (signed("x0" + TEXT[2:-9]), f"semantics 0 of the explorer, this qsim has {SEMANTICS}.*run \"explore\" again"),
        (signed("x2" + TEXT[2:-9]), "semantics 2 of the explorer"),
        (signed(TEXT[:-9] + "~more"), "has 6 parts, expected 5"),
        (signed(TEXT[:-9].replace("0x2", "0-0")), "plain form, which is x1~"),
        (signed(TEXT[:-9].replace("0x2", "0x")), 'part 0 of the run is "0x"; expected'),
        (signed(TEXT[:-9].replace("0x2", "0x999999999")), "more than 1,000,000 choices at part 0"),
        (signed(TEXT[:-9].replace("I3", "I99")), 'invariant "I99" is unknown; known: I1'),
        (signed(TEXT[:-9].replace("split", "tom")), 'commit "tom" is unknown; known: atomic, split'),
    ],
)  # fmt: skip
def test_a_token_that_cannot_be_used_says_why_and_what_to_do(text: str, words: str) -> None:
    with pytest.raises(QsimError, match=words) as refused:
        token_of(text)
    assert 2 == refused.value.exit_code


def test_the_same_token_goes_on_to_mean_the_same_events() -> None:
    """Where this digest moves, tokens that users keep mean another run: raise SEMANTICS with it."""
    told = []
    for space in (LOST.space, Space(defect="D01", steps=2), Space(codes=Codes.SCRATCH), Space(unit=Cadence.STEP)):
        run = followed(space, (0, 1, 1, 0, 0, 0, 1))
        told += [(r.kind, r.phase, tuple(r.op or ()), r.epoch_before) for r in records_of(interleaved(space, run))]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    assert (1, "614a84b40efdc534") == (SEMANTICS, digest)
