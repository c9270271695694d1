"""Interleavings of workers that share quantizer state: spaces, runs, searches. Knows no bit and no event's meaning."""

from qsim.explore.carried import followed
from qsim.explore.counterexample import Counterexample, Replayed, counterexample, replayed
from qsim.explore.result import Engine, Finding, Kind, Search, kind_of
from qsim.explore.runs import Choices, completed, interleaved, preemptions
from qsim.explore.search import BUDGET, explore
from qsim.explore.shrink import shrink
from qsim.explore.space import PARTS, Codes, Commits, Space, space_of
from qsim.explore.threads import Piece, Thread, threads
from qsim.explore.token import SEMANTICS, Token, token_of

__all__ = [
    "BUDGET",
    "PARTS",
    "SEMANTICS",
    "Choices",
    "Codes",
    "Commits",
    "Counterexample",
    "Engine",
    "Finding",
    "Kind",
    "Piece",
    "Replayed",
    "Search",
    "Space",
    "Thread",
    "Token",
    "completed",
    "counterexample",
    "explore",
    "followed",
    "interleaved",
    "kind_of",
    "preemptions",
    "replayed",
    "shrink",
    "space_of",
    "threads",
    "token_of",
]
