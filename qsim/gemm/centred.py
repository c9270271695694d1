"""Products of a centred operand, its centre kept apart from the residual. Knows no codes, no state and no recipe.

X = C + R: R [..., T, K] is the residual (decoded float32), C the centre spread over it. X itself is never formed, so
no element is rounded to the size of its centre. Leading axes are replicas: they broadcast and no sum runs over them;
flatten a batch into tokens. A centre is [..., 1, 1] for a ``tensor``, [..., 1, K] for a ``channel``, [..., T, 1] for
a ``token``, [..., T, ceil(K / block)] for a ``block`` of columns (a tail is smaller); any of its axes may be 1.

The order. Every RN is an exact sum, or one product or one sum of two, rounded once to float32 (ties to even):

    tensor, channel    Y = RN(RN(R W) + row), row = RN(mu^T W), of a tensor mu = m 1: one row for all tokens
    token, block       Y = RN(RN(R W) + RN(M B)), B the sums of W over the rows of each block, RN(1^T W_block)
    dX = RN(dY W^T)    the centre of X has no part in it
    tensor, channel    dW = RN(RN(R^T dY) + P), P = RN(mu e), e = RN(1^T dY)
    token, block       dW = RN(RN(R^T dY) + P), P = RN(M^T dY), each row of it under all rows of its block

A token is a block as wide as K. With dY = 1 d^T + E centred too, one d (a ``tensor`` or ``channel`` centre) for all N
tokens:

    dX = RN(RN(E W^T) + RN(d^T W^T))
    dW = RN(RN(RN(RN(R^T E) + RN(C^T 1 d^T)) + RN(r d^T)) + P), r = RN(R^T 1), P of E in place of dY

C^T 1 d^T is N mu d^T for a channel. The last two terms vanish only where each centre is the current mean of the same
full-precision tensor: not with a stale or a running mean, and not to the bit for a residual that was quantised.

NaN and Inf as in ``qsim.gemm.exact``; NaN is always 7fc00000. The ``_oracle`` twins are the definition, in rationals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from qsim.arrays import F32, AnyArray
from qsim.errors import UsageError
from qsim.gemm.exact import _dot_oracle, matmul

Product: TypeAlias = Callable[[F32, F32], F32]
"""An exact matrix product rounded once: ``matmul``, or that of a backend."""

AXES: Final = ("tensor", "channel", "token", "block")
"""What one value of a centre serves; ``qsim.quant.CenterAxis`` has these values."""

_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)


class WeightGradientTerms(NamedTuple):
    """The four terms of dW in the order in which they are added, float32 [..., K, O]; see the module.

    residuals: RN(R^T E). centers: RN(C^T 1 d^T). residual_sums: RN(r d^T). center_products: P, of rank one for a
    tensor or channel. The middle two are None where dY has no centre.
    """

    residuals: F32
    centers: F32 | None
    residual_sums: F32 | None
    center_products: F32

    def sum(self) -> F32:
        """dW."""
        total = self.residuals
        for term in self[1:]:
            total = total if term is None else _add(total, term)
        return total


def centred_matmul(
    residual: F32, weight: F32, *, center: F32, axis: str, block: int = 0, product: Product = matmul
) -> F32:
    """Y = (C + R) W for R [..., T, K] and W [..., K, O], in the order of the module; float32 [..., T, O].

    axis: one of AXES. block: columns of a block, where the axis is ``block``. product: what multiplies
    matrices. UsageError: an unknown axis, a centre,
    dtype or shape that does not fit.
    """
    center = _fitted(center, residual, axis, block)
    plain = product(residual, weight)
    if axis in ("tensor", "channel"):
        row = np.broadcast_to(center, (*center.shape[:-1], residual.shape[-1]))
        return _add(plain, product(row, weight))
    return _add(plain, product(center, _block_sums(weight, center.shape[-1], _width(residual, axis, block), product)))


def centred_input_gradient(grad: F32, weight: F32, *, grad_center: F32 | None = None, product: Product = matmul) -> F32:
    """dX = dY W^T for dY [..., T, O] and W [..., K, O]^T; with ``grad_center`` d, ``grad`` is the residual E of dY."""
    transposed = weight.swapaxes(-1, -2)
    if grad_center is None:
        return product(grad, transposed)
    return centred_matmul(grad, transposed, center=grad_center, axis="channel", product=product)


def centred_weight_gradient(
    residual: F32, grad: F32, *, center: F32, axis: str, block: int = 0, grad_center: F32 | None = None,
    product: Product = matmul,
) -> F32:  # fmt: skip
    """dW = (C + R)^T dY for dY [..., T, O], in the order of the module; float32 [..., K, O].

    With ``grad_center`` d [..., 1, O] (or 1 in place of O), ``grad`` is the residual E of dY = 1 d^T + E.
    """
    return weight_gradient_terms(
        residual, grad, center=center, axis=axis, block=block, grad_center=grad_center, product=product
    ).sum()


def weight_gradient_terms(
    residual: F32, grad: F32, *, center: F32, axis: str, block: int = 0, grad_center: F32 | None = None,
    product: Product = matmul,
) -> WeightGradientTerms:  # fmt: skip
    """The terms that ``centred_weight_gradient`` adds."""
    center = _fitted(center, residual, axis, block)
    transposed = residual.swapaxes(-1, -2)
    plain = product(transposed, grad)
    ones = np.ones((residual.shape[-2], 1), np.float32)
    if axis in ("tensor", "channel"):
        products = product(center.swapaxes(-1, -2), product(ones.T, grad))
    else:
        products = _spread(product(center.swapaxes(-1, -2), grad), _width(residual, axis, block), residual.shape[-1])
    products = np.broadcast_to(products, np.broadcast_shapes(products.shape, plain.shape))
    if grad_center is None:
        return WeightGradientTerms(plain, None, None, products)
    d = _fitted(grad_center, grad, "channel", 0)
    d = np.broadcast_to(d, (*d.shape[:-1], grad.shape[-1]))
    spread = _whole(center, residual, axis, block).swapaxes(-1, -2)
    return WeightGradientTerms(
        residuals=plain,
        centers=product(spread, np.broadcast_to(d, (*d.shape[:-2], grad.shape[-2], d.shape[-1]))),
        residual_sums=product(product(transposed, ones), d),
        center_products=products,
    )


# ---- the definition ------------------------------------------------------------------------------------------


def centred_matmul_oracle(residual: F32, weight: F32, *, center: F32, axis: str, block: int = 0) -> F32:
    """The definition of ``centred_matmul``, one output at a time in rational numbers; no leading axes. Slow."""
    center = _fitted(center, residual, axis, block)
    width = _width(residual, axis, block)
    depth = residual.shape[-1]
    out = np.empty((residual.shape[0], weight.shape[1]), np.float32)
    for t, o in np.ndindex(out.shape):
        column = weight[:, o].tolist()
        own = center[t % center.shape[0]].tolist()
        if axis in ("tensor", "channel"):
            means = own if len(own) == depth else own * depth
            correction = _dot_oracle(means, column)
        else:
            blocks = [column[j * width : (j + 1) * width] for j in range(len(own))]
            sums = [float(_dot_oracle([1.0] * len(rows), rows)) for rows in blocks]
            correction = _dot_oracle(own, sums)
        out[t, o] = _sum_oracle(_dot_oracle(residual[t].tolist(), column), correction)
    return out


def centred_weight_gradient_oracle(
    residual: F32, grad: F32, *, center: F32, axis: str, block: int = 0, grad_center: F32 | None = None
) -> F32:
    """The definition of ``centred_weight_gradient``, one output at a time in rational numbers; no leading axes."""
    center = _fitted(center, residual, axis, block)
    width = _width(residual, axis, block)
    tokens = residual.shape[0]
    out = np.empty((residual.shape[1], grad.shape[1]), np.float32)
    for k, o in np.ndindex(out.shape):
        rows, column = residual[:, k].tolist(), grad[:, o].tolist()
        served = 0 if center.shape[1] == 1 else k if axis == "channel" else k // width
        means = np.broadcast_to(center[:, served], tokens).tolist()
        total = _dot_oracle(rows, column)
        if grad_center is not None:
            d = float(grad_center[0, o % grad_center.shape[1]])
            total = _sum_oracle(total, _dot_oracle(means, [d] * tokens))
            total = _sum_oracle(total, _dot_oracle([float(_dot_oracle(rows, [1.0] * tokens))], [d]))
        if axis in ("tensor", "channel"):
            mean = float(center[0, served])
            products = _dot_oracle([mean], [float(_dot_oracle([1.0] * tokens, column))])
        else:
            products = _dot_oracle(means, column)
        out[k, o] = _sum_oracle(total, products)
    return out


def _sum_oracle(a: np.float32, b: np.float32) -> np.float32:
    """RN(a + b); two zeros add up to -0 only if both are negative."""
    if a == 0 and b == 0:
        return a if np.signbit(a) and np.signbit(b) else np.float32(0)
    return _dot_oracle([float(a), float(b)], [1.0, 1.0])


# ---- centres ------------------------------------------------------------------------------------------------


def _fitted(center: F32, x: F32, axis: str, block: int) -> F32:
    """``center`` with as many tokens and columns as ``axis`` gives it; UsageError where it does not broadcast."""
    if axis not in AXES:
        raise UsageError(f"centre axis {axis!r} is unknown; known: {', '.join(AXES)}")
    if (axis == "block") != (block > 0):
        raise UsageError(f"centre axis {axis!r} with block {block}: a block centre needs its columns, no other has any")
    for name, array in (("the centre", center), ("the residual", x)):
        if array.dtype != np.float32 or array.ndim < 2:
            raise UsageError(f"{name} is {array.dtype}{list(array.shape)}; pass float32 with at least two axes")
    tokens, columns = x.shape[-2:]
    want = {
        "tensor": (1, 1),
        "channel": (1, columns),
        "token": (tokens, 1),
        "block": (tokens, -(-columns // max(block, 1))),
    }[axis]
    if any(c not in (1, n) for c, n in zip(center.shape[-2:], want, strict=True)):
        raise UsageError(
            f"centre {list(center.shape)} of a residual {list(x.shape)}: a {axis} centre ends in {list(want)}; "
            "an axis of it may be 1"
        )
    rows = 1 if axis in ("tensor", "channel") else tokens
    return np.broadcast_to(center, (*center.shape[:-2], rows, want[1]))


def _width(x: AnyArray, axis: str, block: int) -> int:
    """Columns that one value of a token or block centre serves."""
    return block if axis == "block" else max(x.shape[-1], 1)


def _block_sums(weight: F32, blocks: int, width: int, product: Product) -> F32:
    """B [..., blocks, O]: W summed over the rows of each block, exactly, rounded once. Rows of 0 fill a tail."""
    padded = np.zeros((*weight.shape[:-2], blocks * width, weight.shape[-1]), np.float32)
    padded[..., : weight.shape[-2], :] = weight
    stacked = padded.reshape(*weight.shape[:-2], blocks, width, weight.shape[-1])
    return product(np.ones((1, width), np.float32), stacked)[..., 0, :]


def _spread(rows: F32, width: int, columns: int) -> F32:
    """Row j of [..., blocks, O] under every column of block j: [..., K, O]."""
    return np.repeat(rows, width, axis=-2)[..., :columns, :]


def _whole(center: F32, x: F32, axis: str, block: int) -> F32:
    """C [..., T, K]."""
    tokens, columns = x.shape[-2:]
    if axis in ("token", "block"):
        center = np.repeat(center, _width(x, axis, block), axis=-1)[..., :columns]
    return np.broadcast_to(center, (*center.shape[:-2], tokens, columns))


def _add(a: F32, b: F32) -> F32:
    """RN(a + b); NaN is always 7fc00000."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total = np.asarray(a + b, np.float32)
    return np.where(np.isnan(total), _QUIET_NAN, total)
