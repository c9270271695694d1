"""What one training run is: model, quantizers, optimizer, data, schedule, defect, as plain values. Runs nothing."""

from __future__ import annotations

import msgspec

from qsim.errors import StudyError

CORRECT, HIGH_PRECISION = "correct", "high_precision"
"""Runs without a defect: the correct protocol, and the same model with nothing cast."""
CONTROLS = (CORRECT, HIGH_PRECISION)
JOIN = "+"
"""Between defects that are put on a run one after the other, the left one first."""
BUILTIN, SCRATCH = "builtin", "scratch"
"""Checkpoints by name: the trained model that ships, and parameters drawn from the seed."""
TRAINED = "trained:"
"""Before a number of steps: a checkpoint that is trained where it is wanted, and kept in the cache."""
SAVED, RECOMPUTED = "saved", "recomputed"
"""Attention statistics: forward's log-sum-exp and output are kept for backward, or both are computed again."""


class ModelParams(msgspec.Struct, frozen=True, kw_only=True):
    """A byte-level decoder: pre-RMSNorm, causal attention, untied head, learned positions.

    context: tokens of a sequence. activation: "swiglu" or "gelu". statistics: of attention, "saved" or "recomputed".
    half: type that recomputed attention probabilities and gradients of activations are rounded to: "float32", "float16"
    or "bfloat16". key_mean: how often the mean of all keys of a microbatch (by channel) is added to each of them: every
    row of the logits moves as a whole, so attention stays what it is, while |mean| / sigma of the keys grows by 1 +
    key_mean.
    """

    layers: int = 8
    width: int = 64
    heads: int = 4
    hidden: int = 128
    context: int = 64
    activation: str = "swiglu"
    statistics: str = SAVED
    half: str = "float32"
    key_mean: float = 0.0


class QuantParams(msgspec.Struct, frozen=True, kw_only=True):
    """What is cast, by which recipe. Everything else is float32.

    linear: the roles of the four linear layers that are cast: of "input", "weight", "grad_output". attention: operands
    of the two attention products that are cast: of "q", "k", "v", "p". fmt, recipe, window: as in a lifecycle study
    ("e4m3", "delayed" ...); grad_fmt: of grad_output. center_*: of the attention recipe where it is "centred".
    initial_scale: of delayed scaling before anything was seen.
    """

    linear: tuple[str, ...] = ("input",)
    fmt: str = "float8_e4m3fn"
    grad_fmt: str = "float8_e5m2"
    recipe: str = "delayed"
    window: int = 2
    attention: tuple[str, ...] = ()
    attention_fmt: str = "float4_e2m1fn"
    attention_recipe: str = "delayed"
    attention_window: int = 1
    center_axis: str = "channel"
    center_source: str = "last"
    center_decay: float = 0.9
    initial_scale: float = 1.0


class OptimizerParams(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer and what surrounds it. clip 0 clips nothing; loss_scale 1 scales nothing.

    kind: "adamw" or "sgd". warmup: steps of a linear rise of the learning rate. dynamic: the loss scale halves at a
    step that is skipped and doubles after ``growth_interval`` that are not.
    """

    kind: str = "adamw"
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9
    warmup: int = 0
    clip: float = 1.0
    loss_scale: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000


class DataParams(msgspec.Struct, frozen=True, kw_only=True):
    """Text and the weights that training starts from.

    text: "builtin" or a file; batch: sequences of a microbatch. checkpoint: "builtin" (the trained model that ships),
    "scratch" (drawn from the seed), "trained:N" (N steps from scratch, made once and kept in the cache) or a file.
    spread: exponents e of each layer: W_q *= 2^e and W_k *= 2^-e, which leaves float32 logits as they are, to the bit.
    *_digest: sha256 of the bytes, so that a case is tied to them.
    """

    text: str = "builtin"
    text_digest: str = ""
    batch: int = 8
    checkpoint: str = "builtin"
    checkpoint_digest: str = ""
    spread: tuple[int, ...] = ()


class LoopParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the steps go.

    first: number of the first step, for a run that goes on where another has ended. warm_steps come before the steps
    that count: they run whole and change no parameter, so that delayed states have seen data. workers: they share the
    microbatches. scope: owners of states, "" for the usual ones. matched: the steps, counted from the first one that
    counts, in which forward and recompute are compared at every matched point.
    """

    first: int = 0
    steps: int = 40
    warm_steps: int = 3
    microbatches: int = 1
    workers: int = 1
    order: str = "forward_first"
    stages: int = 2
    features: tuple[str, ...] = ()
    preset: str = "seed_correct"
    scope: str = ""
    matched: tuple[int, ...] = ()


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One training run, for any number of seeds at once.

    defect: an id of the catalogue ("D03", "D26/mean"), "stale_scale", "correct", or "high_precision", which casts
    nothing. fix: a repair on top of it, "" for none. accumulation: of matrix products: "exact" (sums rounded once: the
    same bits everywhere), "blas" (plain float32 BLAS: fast, bits of this machine) or "tf32" (operands rounded to 10
    explicit mantissa bits, sums exact).
    """

    model: ModelParams = ModelParams()
    quant: QuantParams = QuantParams()
    optimizer: OptimizerParams = OptimizerParams()
    data: DataParams = DataParams()
    loop: LoopParams = LoopParams()
    defect: str = CORRECT
    fix: str = ""
    accumulation: str = "exact"
    backend: str = "numba"


def defects_of(protocol: str) -> tuple[str, ...]:
    """The defects of a protocol in the order in which they are applied: "D04+D02" -> D04, D02; none for a control."""
    return () if protocol in CONTROLS else tuple(part.strip() for part in protocol.split(JOIN))


def steps_of(checkpoint: str) -> int:
    """N of "trained:N"; StudyError where it is no whole number from 1 on."""
    words = checkpoint.removeprefix(TRAINED)
    if not (words.isascii() and words.isdigit() and 0 < int(words) < 10**6):
        raise StudyError(
            f'workload.checkpoint "{checkpoint}": after {TRAINED} stands a number of steps from 1 to 999999, like '
            f"{TRAINED}1000"
        )
    return int(words)
