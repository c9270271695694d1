"""Forward and backward of the nodes of a byte-level GPT decoder. Knows arrays; no schedule, no event, no state."""

from qsim.nn.arithmetic import Arithmetic
from qsim.nn.attention import join3, probabilities, softmax, softmax_backward, split3
from qsim.nn.dims import Dims
from qsim.nn.embedding import embed, embed_backward
from qsim.nn.feed_forward import gelu, gelu_backward, swiglu, swiglu_backward
from qsim.nn.loss import cross_entropy, scale_gradient
from qsim.nn.norm import rmsnorm, rmsnorm_backward
from qsim.nn.optimizer import Hyper, OptimizerState, StepReport, initial_state, update
from qsim.nn.rounding import round_to

__all__ = [
    "Arithmetic",
    "Dims",
    "Hyper",
    "OptimizerState",
    "StepReport",
    "cross_entropy",
    "embed",
    "embed_backward",
    "gelu",
    "gelu_backward",
    "initial_state",
    "join3",
    "probabilities",
    "rmsnorm",
    "rmsnorm_backward",
    "round_to",
    "scale_gradient",
    "softmax",
    "softmax_backward",
    "split3",
    "swiglu",
    "swiglu_backward",
    "update",
]
