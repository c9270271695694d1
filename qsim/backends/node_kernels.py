"""The nodes of a decoder, each one pass over a few rows that stay in the cache. Knows no array module and no dtype.

Every step is the one of the array formula in ``qsim.nn`` with exact arithmetic: the same operations in the same order,
each rounded to float32, exp and log of ``elementwise_kernels``, sums by halves. What differs is what is left out where
it cannot be seen: masked keys are not exponentiated, their +0 is written.

A NaN among the numbers of a softmax makes its total NaN, and so all of the row, whatever the largest number was
taken for. Which NaN comes out of two is the processor's choice, here as in the formula. A largest number that is a zero
may have either sign: the log of a total is never -0, and added to it, or taken from a number, it shows in no bit.

Arrays are in C order, and flat where rows are read as vectors; a row of scores is one query, its keys T numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.backends.elementwise_kernels import exp_one, log_one
from qsim.backends.vector_kernels import (
    LANES,
    every,
    halved,
    halved_rows,
    kept,
    larger,
    largest,
    load,
    load_some,
    store,
    store_some,
)
from qsim.codec.jit import inlined, kernel, prefetch, read, write

if TYPE_CHECKING:
    from qsim.arrays import F32, I64

_F4, _I8 = numba.float32, numba.int64

SPACE = 4096
"""Numbers that are exponentiated together: long enough for LLVM's own vectors, and at home in the first cache."""

ZERO = np.float32(0)
ONE = np.float32(1)
MINUS_INF = np.float32(-np.inf)


# ---- softmax --------------------------------------------------------------------------------------------------


@inlined
def padded(count: Any) -> Any:
    """The next multiple of LANES."""
    return (count + LANES - 1) // LANES * LANES


@inlined
def rows_at_once(width: Any) -> Any:
    """Rows of ``width`` numbers in SPACE, at least one."""
    return max(1, SPACE // width)


@inlined
def ask(x: Any, at: Any, count: Any) -> None:
    """Ask for x[at : at + count], which comes while others are exponentiated."""
    for j in range(0, count, LANES):
        prefetch(x, at + j)


@inlined
def exp_all(x: Any, count: Any) -> None:
    """x[:count] = e^x[:count]."""
    for k in range(count):
        x[k] = exp_one(x[k])


@inlined
def put_row(t: Any, at: Any, below: Any, keys: Any, p: Any, to: Any, context: Any) -> None:
    """A row of p: ``keys`` numbers t / below, then +0."""
    divisor = every(below)
    for j in range(0, keys, LANES):
        store_some(kept(load(t, at + j) / divisor, keys - j), p, to + j, context - j)
    for j in range(padded(keys), context, LANES):
        store_some(every(ZERO), p, to + j, context - j)


@inlined
def put_scores(s: Any, at: Any, keys: Any, scale: Any, t: Any, to: Any) -> Any:
    """A row of t = s scale less its largest, which is returned.

    Rows of t lie end to end. What the last vector writes behind a row is noise, and the next row overwrites it.
    """
    factor, top = every(scale), every(MINUS_INF)
    for j in range(0, keys, LANES):
        scaled = load_some(s, at + j, keys - j, MINUS_INF) * factor
        store(scaled, t, to + j)
        top = larger(top, scaled)
    most = largest(top)
    away = every(most)
    for j in range(0, keys, LANES):
        store(load(t, to + j) - away, t, to + j)
    return most


@inlined
def total_of(t: Any, at: Any, keys: Any, context: Any, row: Any) -> Any:
    """The sum of t[at : at + keys] and the +0 of masked keys behind them, by halves."""
    for j in range(0, keys, LANES):
        store(kept(load(t, at + j), keys - j), row, j)
    for j in range(padded(keys), context, LANES):
        store(every(ZERO), row, j)
    return halved(row, context)


@kernel(read(_F4, 1), _F4, write(_F4, 1), write(_F4, 1))
def softmax(s: F32, scale: np.float32, p: F32, lse: F32) -> None:
    """s, p [rows * T]; lse [rows]: see ``qsim.nn.attention.softmax``."""
    rows = lse.size
    context = s.size // rows
    block = rows_at_once(context)
    t, top = np.empty(block * context + LANES, np.float32), np.empty(block, np.float32)
    row = np.empty(padded(context) + LANES, np.float32)
    for first in range(0, rows, block):
        last, at = min(first + block, rows), 0
        for i in range(first, last):
            keys = i % context + 1
            top[i - first] = put_scores(s, i * context, keys, scale, t, at)
            ask(s, (i + block) * context, keys)
            ask(p, i * context, context)
            at += keys
        exp_all(t, at)
        at = 0
        for i in range(first, last):
            keys = i % context + 1
            lse[i] = total_of(t, at, keys, context, row)
            put_row(t, at, lse[i], keys, p, i * context, context)
            at += keys
        for i in range(first, last):
            lse[i] = log_one(lse[i]) + top[i - first]


@kernel(read(_F4, 1), read(_F4, 1), _F4, write(_F4, 1))
def probabilities(s: F32, lse: F32, scale: np.float32, p: F32) -> None:
    """s, p [rows * T]; lse [rows]: see ``qsim.nn.attention.probabilities``."""
    rows = lse.size
    context = s.size // rows
    block = rows_at_once(context)
    t = np.empty(block * context + LANES, np.float32)
    factor = every(scale)
    for first in range(0, rows, block):
        last, at = min(first + block, rows), 0
        for i in range(first, last):
            keys, away = i % context + 1, every(lse[i])
            for j in range(0, keys, LANES):
                store(load_some(s, i * context + j, keys - j, MINUS_INF) * factor - away, t, at + j)
            ask(s, (i + block) * context, keys)
            ask(p, i * context, context)
            at += keys
        exp_all(t, at)
        at = 0
        for i in range(first, last):
            keys, to = i % context + 1, i * context
            for j in range(0, keys, LANES):
                store_some(kept(load(t, at + j), keys - j), p, to + j, context - j)
            for j in range(padded(keys), context, LANES):
                store_some(every(ZERO), p, to + j, context - j)
            at += keys


@kernel(read(_F4, 1), read(_F4, 1), read(_F4, 1), read(_F4, 1), _I8, _I8, _F4, write(_F4, 1))
def softmax_backward(
    p: F32, dp: F32, do: F32, o: F32, heads: int, head_width: int, scale: np.float32, ds: F32
) -> None:  # fmt: skip
    """p, dp, ds [sequences * heads * T * T]; do, o [sequences * T * d]: see ``qsim.nn.attention.softmax_backward``."""
    width = heads * head_width
    context = ds.size * width // (do.size * heads)
    row, factor = np.empty(padded(head_width) + LANES, np.float32), every(scale)
    for i in range(ds.size // context):
        query, head, sequence = i % context, i // context % heads, i // context // heads
        at = (sequence * context + query) * width + head * head_width
        for j in range(0, head_width, LANES):
            count = head_width - j
            store(load_some(do, at + j, count, ZERO) * load_some(o, at + j, count, ZERO), row, j)
        delta = every(halved(row, head_width))
        keys, at = query + 1, i * context
        for j in range(0, keys, LANES):
            count = keys - j
            made = (load_some(dp, at + j, count, ZERO) - delta) * load_some(p, at + j, count, ZERO) * factor
            store_some(kept(made, count), ds, at + j, context - j)
        for j in range(padded(keys), context, LANES):
            store_some(every(ZERO), ds, at + j, context - j)


@kernel(read(_F4, 2), read(_I8, 1), _F4, write(_F4, 1), write(_F4, 2), write(_I8, 1))
def cross_entropy(logits: F32, targets: I64, count: np.float32, loss: F32, p: F32, wrong: I64) -> None:
    """logits, p [R * N, V], targets [R * N], count N, loss [R]: see ``qsim.nn.loss.cross_entropy``.

    wrong[0]: how many targets are not in 0..V-1; then the rest is noise.
    """
    (rows, words), replicas = logits.shape, loss.size
    tokens = rows // replicas
    row, nats = np.empty(words + LANES, np.float32), np.empty(tokens + LANES, np.float32)
    turn = ONE / count
    exact = turn * count == ONE and tokens & (tokens - 1) == 0  # x / 2^k is x * 2^-k, and that is the cheaper one
    wrong[0] = 0
    for i in range(rows):
        top = every(MINUS_INF)
        for j in range(0, words, LANES):
            top = larger(top, load_some(logits, i * words + j, words - j, MINUS_INF))
        most = largest(top)
        for j in range(words):
            p[i, j] = exp_one(logits[i, j] - most)
        for j in range(words):
            row[j] = p[i, j]
        total = halved(row, words)
        target = targets[i]
        if target < 0 or target >= words:
            wrong[0] += 1
            target = 0
        nats[i % tokens] = (most - logits[i, target]) + log_one(total)
        if i % tokens == tokens - 1:
            loss[i // tokens] = halved(nats, tokens) / count
        for j in range(words):
            p[i, j] = p[i, j] / total
        p[i, target] -= ONE
        if exact:
            for j in range(words):
                p[i, j] = p[i, j] * turn
        else:
            for j in range(words):
                p[i, j] = p[i, j] / count


# ---- SwiGLU ---------------------------------------------------------------------------------------------------


@inlined
def logistic(a: Any) -> Any:
    """1 / (1 + e^-a)."""
    return ONE / (exp_one(-a) + ONE)


@kernel(read(_F4, 2), write(_F4, 2))
def swiglu(u: F32, g: F32) -> None:
    """u [rows, 2h], g [rows, h]: see ``qsim.nn.feed_forward.swiglu``."""
    rows, h = g.shape
    for i in range(rows):
        for j in range(h):
            a = u[i, j]
            g[i, j] = logistic(a) * a * u[i, h + j]


@kernel(read(_F4, 2), read(_F4, 2), write(_F4, 2))
def swiglu_backward(u: F32, dg: F32, du: F32) -> None:
    """u, du [rows, 2h], dg [rows, h]: see ``qsim.nn.feed_forward.swiglu_backward``."""
    rows, h = dg.shape
    for i in range(rows):
        for j in range(h):
            a = u[i, j]
            s = logistic(a)
            silu = a * s
            du[i, j] = ((ONE - s) * silu + s) * u[i, h + j] * dg[i, j]
            du[i, h + j] = silu * dg[i, j]


# ---- RMSNorm --------------------------------------------------------------------------------------------------


@inlined
def reciprocal_root(x: Any, i: Any, width: Any, eps: Any, row: Any) -> Any:
    """1 / sqrt(mean(x[i]^2) + eps)."""
    d = x.shape[1]
    for j in range(d):
        row[j] = x[i, j] * x[i, j]
    return ONE / np.sqrt(halved(row, d) / width + eps)


@kernel(read(_F4, 2), read(_F4, 2), _F4, _F4, write(_F4, 2))
def rmsnorm(x: F32, g: F32, width: np.float32, eps: np.float32, y: F32) -> None:
    """x, y [R * N, d], g [R, d], width d: see ``qsim.nn.norm.rmsnorm``."""
    rows, d = x.shape
    tokens = rows // len(g)
    row = np.empty(d + LANES, np.float32)
    for i in range(rows):
        own = i // tokens
        r = reciprocal_root(x, i, width, eps, row)
        for j in range(d):
            y[i, j] = x[i, j] * r * g[own, j]


@kernel(read(_F4, 2), read(_F4, 2), read(_F4, 2), _F4, _F4, write(_F4, 2), write(_F4, 2))
def rmsnorm_backward(
    x: F32, g: F32, dy: F32, width: np.float32, eps: np.float32, dx: F32, dg: F32
) -> None:  # fmt: skip
    """x, dy, dx [R * N, d], g, dg [R, d]: see ``qsim.nn.norm.rmsnorm_backward``."""
    replicas, d = g.shape
    tokens = len(x) // replicas
    row, products = np.empty(d + LANES, np.float32), np.empty(tokens * d + LANES, np.float32)
    for own in range(replicas):
        for token in range(tokens):
            i = own * tokens + token
            r = reciprocal_root(x, i, width, eps, row)
            for j in range(d):
                n = x[i, j] * r
                products[token * d + j] = dy[i, j] * n
                row[j] = dy[i, j] * g[own, j] * n
            mean = halved(row, d) / width
            for j in range(d):
                dx[i, j] = (dy[i, j] * g[own, j] - x[i, j] * r * mean) * r
        halved_rows(products, tokens, d)
        for j in range(d):
            dg[own, j] = products[j]
