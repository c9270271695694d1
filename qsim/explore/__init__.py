"""Interleavings of workers that share quantizer state: spaces, runs, searches. Knows no bit and no event's meaning."""

from qsim.explore.result import Engine, Finding, Kind, Search, kind_of
from qsim.explore.runs import Choices, completed, interleaved, judge, preemptions
from qsim.explore.search import BUDGET, explore
from qsim.explore.space import PARTS, Codes, Commits, Space, space_of
from qsim.explore.threads import Piece, Thread, threads

__all__ = [
    "BUDGET",
    "PARTS",
    "Choices",
    "Codes",
    "Commits",
    "Engine",
    "Finding",
    "Kind",
    "Piece",
    "Search",
    "Space",
    "Thread",
    "completed",
    "explore",
    "interleaved",
    "judge",
    "kind_of",
    "preemptions",
    "space_of",
    "threads",
]
