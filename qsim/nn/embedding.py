"""Token and position embeddings, forward and backward. Knows no layer."""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32, AnyArray
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.dims import Dims


@np.errstate(all="ignore")
def embed(A: Arithmetic, D: Dims, tokens: AnyArray, table: F32, positions: F32) -> F32:
    """h [R, N, d]: the row of ``table`` [R, V, d] that a token names plus the row of ``positions`` [R, T, d].

    tokens: integers [R, B, T] in 0..V-1.
    """
    replicas = len(tokens)
    own = A.xp.arange(replicas)[:, None, None]
    h: F32 = table[own, tokens]
    h += positions[:, None]
    return h.reshape(replicas, D.tokens, D.width)


@np.errstate(all="ignore")
def embed_backward(A: Arithmetic, D: Dims, tokens: AnyArray, dh: F32) -> tuple[F32, F32]:
    """(dtable [R, V, d], dpositions [R, T, d]) of dh [R, N, d].

    dtable is a product with the one-hot rows of the tokens: no scatter, whose order of additions would be anybody's.
    """
    replicas = len(tokens)
    flat = tokens.reshape(replicas, 1, D.tokens)
    one_hot = (flat == A.xp.arange(D.vocabulary)[:, None]).astype(dh.dtype)
    dtable = A.product(one_hot, dh)
    dpositions = A.total(dh.reshape(replicas, D.batch, D.context, D.width), 1)
    return dtable, dpositions
