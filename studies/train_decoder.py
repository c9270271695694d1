"""Trains the decoder that ships with qsim, from scratch on the shipped text, nothing cast. Takes some minutes.

    python studies/train_decoder.py --out FILE
    python studies/train_decoder.py --check FILE

Products are exact sums rounded once and all else has a fixed order, so every machine makes the same bytes. --check
exits 1 where FILE is not, byte for byte, what comes out. --steps N and --seed N: another training, to compare with.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

from qsim.training.config import TrainConfig
from qsim.training.pretrain import SEED, trained
from qsim.training.run import RunState, Trained, train_on
from qsim.training.text import TEXT_SHA256
from qsim.training.weights import save_weights

STEPS = 2500


def loudly(config: TrainConfig, seeds: tuple[int, ...], state: RunState | None) -> Trained:
    """``train_on``, telling how far it is."""
    done = train_on(config, seeds, state)
    last = done.log.steps[-1]
    print(f"step {last.step + 1}: loss {last.loss[0]:.4f}, held out {done.log.final_loss[0]:.4f}", flush=True)
    return done


def write(path: Path, steps: int, seed: int) -> str:
    """Train, write the weights as bfloat16, return the sha256 of the file."""
    weights = trained(TrainConfig(), steps, loudly, seed=seed)
    metadata = {"text": TEXT_SHA256, "steps": str(steps), "seed": str(seed)}
    save_weights(path, weights, metadata=metadata, dtype="bfloat16")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="FILE")
    target.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: at least 1")
    if given.out is not None:
        print(f"{given.out}: sha256 {write(given.out, given.steps, given.seed)}")
        return 0
    expected = hashlib.sha256(given.check.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "weights", given.steps, given.seed)
    print(f"{given.check}: {'the same bytes' if made == expected else f'sha256 {expected}, training gives {made}'}")
    return 0 if made == expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
