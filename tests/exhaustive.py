"""All 2^32 float32 patterns of a format against independent implementations: ``make exhaustive``. Resumes by itself.

Each job (format, overflow, against) is cut into 256 shards of 2^24 patterns; a finished shard is a line of the
journal, with a digest of the codec's sources: after an interruption only what is missing runs, after an edit all of
it. Stops at the first pattern whose codes differ, with both codes; exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qsim._paths import package_dir
from qsim.arrays import U8, U32
from qsim.codec import encode
from qsim.conformance.steps import steps_of
from qsim.formats import get_format, get_policy
from tests.conformance.nvidia_headers import load
from tests.oracles import OracleMissingError

SHARD = 1 << 24
SHARDS = (1 << 32) // SHARD
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu")
JOURNAL = Path("qsim-out/exhaustive.jsonl")

Encoder = Callable[[int, U32], U8]
"""First pattern and patterns -> codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One format under one policy against one implementation."""

    fmt: str
    policy: str
    against: str

    def __str__(self) -> str:
        return f"{self.fmt} {self.policy} against {self.against}"


def jobs() -> list[Job]:
    """Both overflow modes where the format has two (a format without Inf and NaN always saturates)."""
    policies = {fmt: ("cuda",) if not get_format(fmt).has_nan else ("cuda", "cuda_nosat") for fmt in FORMATS}
    found = [
        Job(fmt=fmt, policy=policy, against=against)
        for fmt in FORMATS
        for policy in policies[fmt]
        for against in ("steps", "nvidia")
    ]
    # NVIDIA's E8M0 conversion rounds toward zero or up, never to nearest.
    return [job for job in found if job.against == "steps" or job.fmt != "float8_e8m0fnu"]


def encoder_of(job: Job) -> Encoder:
    """The independent implementation of a job; OracleMissingError where it is not there."""
    if job.against == "steps":
        steps = steps_of(get_format(job.fmt), get_policy(job.policy))
        return lambda start, bits: steps.codes_of(start, start + bits.size)
    headers = load()
    return lambda _, bits: headers.encode(bits.view(np.float32), job.fmt, saturate=job.policy == "cuda")


def check_shard(job: Job, shard: int, expected_of: Encoder) -> str:
    """What differs first in a shard, or nothing."""
    start = shard * SHARD
    bits = np.arange(start, start + SHARD, dtype=np.uint32)
    actual = encode(bits.view(np.float32), job.fmt, policy=job.policy)
    expected = expected_of(start, bits)
    if np.array_equal(expected, actual):
        return ""
    first = int(np.argmax(expected != actual))
    pattern, value = int(bits[first]), float(bits[first : first + 1].view(np.float32)[0])
    return f"{job}: pattern {pattern:08X} ({value!r}): expected {expected[first]:02X}, actual {actual[first]:02X}"


def sources() -> str:
    """Digest of every source that a code can depend on."""
    digest = hashlib.sha256()
    for room in ("formats", "codec"):
        for path in sorted((package_dir() / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_journal(path: Path, digest: str) -> dict[tuple[str, int], float]:
    """(job, shard) -> seconds of what was finished with these sources; torn lines and older sources are passed over."""
    done: dict[tuple[str, int], float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            if entry["digest"] == digest:
                done[entry["job"], entry["shard"]] = entry["seconds"]
        except (ValueError, KeyError, TypeError):
            continue
    return done


def main(arguments: list[str] | None = None) -> int:
    """Run what the journal lacks; 0 where all patterns of all jobs agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--only", default="", help="jobs whose description contains this")
    parser.add_argument("--shards", type=int, default=SHARDS, help="stop after this many shards of each job")
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.shards <= SHARDS:
        parser.error(f"--shards {chosen.shards} is outside 1..{SHARDS}")
    if not any(chosen.only in str(job) for job in jobs()):
        parser.error(f"--only {chosen.only!r} matches no job; the jobs: " + "; ".join(map(str, jobs())))
    digest = sources()
    done = read_journal(chosen.journal, digest)
    chosen.journal.parent.mkdir(parents=True, exist_ok=True)
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    missing = []
    with chosen.journal.open("a") as journal, Progress(TextColumn("{task.description}"), *bar) as progress:
        for job in (job for job in jobs() if chosen.only in str(job)):
            try:
                expected_of = encoder_of(job)
            except OracleMissingError as error:
                missing.append(f"{job}: not run: {error}")
                continue
            shards = [s for s in range(chosen.shards) if (str(job), s) not in done]
            task = progress.add_task(str(job), total=chosen.shards, completed=chosen.shards - len(shards))
            for shard in shards:
                before = time.perf_counter()
                problem = check_shard(job, shard, expected_of)
                if problem:
                    progress.stop()
                    print(problem, file=sys.stderr)
                    return 1
                done[str(job), shard] = seconds = time.perf_counter() - before
                journal.write(
                    json.dumps({"job": str(job), "shard": shard, "seconds": seconds, "digest": digest}) + "\n"
                )
                journal.flush()
                progress.advance(task)
    for job in (job for job in jobs() if chosen.only in str(job)):
        times = [t for (name, _), t in done.items() if name == str(job)]
        if times:
            print(f"{job}: {len(times) * SHARD} patterns agree, {sum(times):.1f} s")
    for line in missing:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
