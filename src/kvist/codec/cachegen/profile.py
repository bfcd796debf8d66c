"""From KV that a model made, and how much its answers mind errors, to a table.

For each head of each layer and kind: the mean of every channel (of keys turned back by their
position), and a basis. Channels are first scaled by the square root of their Fisher information,
the mean square of the derivative of the log-likelihood of tokens that the model itself draws: to
second order, an error of one unit of scaled length then costs half a nat wherever it stands. The
principal directions of the scaled channels are independent, and one step for all of them is the
allocation of bits that costs least for what it takes (reverse water-filling).

The spread of each direction, in quarter octaves, and how peaked it is choose its class; the
distributions of the classes are pooled over everything that falls into them.

Source: T. Berger, "Rate Distortion Theory", 1971, for the allocation; for the Fisher information as
a metric of quantisation, Y. Choi et al., "Towards the Limit of Network Quantization", ICLR 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.codec.cachegen.levels import FINEST_KL
from kvist.codec.cachegen.table import (
    CLASSES,
    SCALE_ZERO,
    SCALES,
    SHAPES,
    ProfileTable,
    TableShape,
)
from kvist.core.errors import ConfigError
from kvist.native.rans_twin import SYMBOLS, normalise

ANCHOR_TOKENS = 10
NOMINAL_TOKENS = 512  # the context for which a level's nominal KL is meant
_SKIPPED = 4  # first tokens of a context: sinks, which are coded apart
_POOLED_ROWS = 4096  # of each shape, for the distributions
_POOLED_VALUES = 256  # of each row
_STRANGE = 1.3  # times what all but one in a thousand tokens stay below
_PEAKED = (1.03, 1.09, 1.2)  # spread by squares / spread by absolutes: where shapes part
_NORMAL = np.sqrt(np.pi / 2)
_TINY = 1e-30

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """KV of one context from its first token.

    `kv` is `[layers, kinds, heads, tokens, D]` float32, or bfloat16 as uint16.
    """

    kv: npt.NDArray[np.float32] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Fisher information: `square` is `[layers, kinds, heads, D]`, the mean over a context's tokens
    of the squared derivative of the summed log-likelihood of `answer_tokens` tokens after it.
    """

    square: npt.NDArray[np.float64]
    answer_tokens: int


@dataclass(slots=True)
class _Spread:
    """What is known of rows: exponent and shape of each, and values of some."""

    exponent: npt.NDArray[np.int16]
    shape: npt.NDArray[np.uint8]


def build_table(
    samples: Sequence[Sample],
    sensitivity: Sensitivity,
    *,
    inv_freq: npt.NDArray[np.float64] | None = None,
) -> ProfileTable:
    """The table of a model.

    Args:
        inv_freq: `[pairs]`, the angles per token by which keys were turned (channel i with
            channel i + pairs); `None` leaves keys as they are.

    Raises:
        ConfigError: no samples, or too few tokens, or shapes that do not fit.
    """
    if not samples or any(s.kv.shape[3] <= _SKIPPED + ANCHOR_TOKENS for s in samples):
        raise ConfigError("a profile needs contexts of at least 15 tokens")
    layers, kinds, heads, _, dim = samples[0].kv.shape
    shape = TableShape(layers, kinds, heads, dim)
    if sensitivity.square.shape != (layers, kinds, heads, dim):
        raise ConfigError("the sensitivity is not of the samples' shape")
    turning = np.zeros(0) if inv_freq is None else np.asarray(inv_freq, np.float64)
    mean = np.zeros((shape.regions, dim), np.float32)
    weight, basis = np.zeros_like(mean), np.zeros((shape.regions, dim, dim), np.int8)
    pool = _Pool()
    rows, deltas = _empty(mean.shape), _empty(mean.shape)
    steps = np.zeros((layers, kinds), np.float32)
    squares = np.zeros(sum(sample.kv.shape[3] - _SKIPPED for sample in samples))
    for region, x in enumerate(_regions(samples)):
        layer, kind, head = np.unravel_index(region, (layers, kinds, heads))
        pairs = len(turning) if kind == 0 else 0
        back = [_turn_back(part, turning[:pairs])[_SKIPPED:] for part in x]
        weight[region] = _weights(sensitivity.square[layer, kind, head], pairs)
        mean[region], basis[region], y = _basis(np.concatenate(back), weight[region])
        squares += np.square(_describe(y, region, rows, pool), dtype=np.float64).sum(1)
        delta = np.concatenate([_deltas(part) for part in x])
        if head == 0:
            steps[layer, kind] = max(_TINY, float(np.sqrt(np.mean(np.square(delta)))))
        _describe(delta / steps[layer, kind], region, deltas, pool)
    count = NOMINAL_TOKENS * shape.rows
    finest = np.sqrt(24 * FINEST_KL * sensitivity.answer_tokens / count)
    table = ProfileTable(
        shape=shape,
        gauge=round(4 * np.log2(finest)),
        strange=float(np.float32(_STRANGE * np.quantile(squares, 0.999) / shape.rows)),
        inv_freq=turning,
        mean=mean,
        weight=weight,
        delta_step=steps,
        basis=basis,
        row_exponent=rows.exponent,
        row_shape=rows.shape,
        delta_exponent=deltas.exponent,
        delta_shape=deltas.shape,
        frequencies=pool.frequencies(),
    )
    table.check()
    return table


def turning_pays(
    samples: Sequence[Sample], sensitivity: Sensitivity, inv_freq: npt.NDArray[np.float64]
) -> bool:
    """Whether keys turned back by these frequencies spread less, on a few of the layers.

    So a model that pairs its channels in another way, or turns keys otherwise, is noticed.
    """
    layers = samples[0].kv.shape[0]
    some = sorted({0, layers // 3, 2 * layers // 3, layers - 1})
    with_, without = (
        sum(_key_spread(samples, sensitivity, layer, turning) for layer in some)
        for turning in (inv_freq, np.zeros(0))
    )
    return with_ < without


def _key_spread(
    samples: Sequence[Sample],
    sensitivity: Sensitivity,
    layer: int,
    turning: npt.NDArray[np.float64],
) -> float:
    """Sum of the logarithms of how far the first head's keys spread."""
    parts = [_floats(sample.kv[layer, 0, 0]) for sample in samples]
    back = np.concatenate([_turn_back(part, turning)[_SKIPPED:] for part in parts])
    weight = _weights(sensitivity.square[layer, 0, 0], len(turning))
    _, _, y = _basis(back, weight)
    return float(np.log2(np.abs(y).mean(0) + _TINY).sum())


def _empty(shape: tuple[int, ...]) -> _Spread:
    return _Spread(np.zeros(shape, np.int16), np.zeros(shape, np.uint8))


def _regions(samples: Sequence[Sample]) -> Iterator[list[Floats]]:
    """For each region the `[tokens, D]` of every sample."""
    for layer, kind, head in np.ndindex(*samples[0].kv.shape[:3]):
        yield [_floats(sample.kv[layer, kind, head]) for sample in samples]


def _floats(part: npt.NDArray[Any]) -> Floats:
    if part.dtype == np.uint16:
        part = (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return part.astype(np.float32, copy=False)


def _turn_back(x: Floats, inv_freq: npt.NDArray[np.float64]) -> Floats:
    pairs = len(inv_freq)
    angle = np.arange(len(x))[:, None] * inv_freq
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = x[:, :pairs], x[:, pairs : 2 * pairs]
    return np.concatenate([a * cos + b * sin, b * cos - a * sin, x[:, 2 * pairs :]], axis=1)


def _weights(square: npt.NDArray[np.float64], pairs: int) -> Floats:
    """Square roots of the information, the same for channels that are turned together."""
    square = square.copy()
    both = (square[:pairs] + square[pairs : 2 * pairs]) / 2
    square[: 2 * pairs] = np.concatenate([both, both])
    # No channel is thought to be free, however little the texts showed of it.
    out: Floats = np.sqrt(square + 0.01 * square.mean() + _TINY).astype(np.float32)
    return out


def _basis(x: Floats, weight: Floats) -> tuple[Floats, npt.NDArray[np.int8], Floats]:
    """Mean, basis, and the values in it: `[tokens, directions]`."""
    mean = x.mean(0, dtype=np.float64).astype(np.float32)
    scaled = (x - mean) * weight
    wide = scaled.astype(np.float64)
    _, vectors = np.linalg.eigh(wide.T @ wide / len(wide))
    basis = np.rint(vectors.T[::-1] * 127).astype(np.int8)
    y = np.linalg.solve(basis.T.astype(np.float64) / 127, wide.T).T
    return mean, basis, y.astype(np.float32)


def _deltas(x: Floats) -> Floats:
    """What is left of each token after the first of its group of ten."""
    whole = x[: len(x) // ANCHOR_TOKENS * ANCHOR_TOKENS].reshape(-1, ANCHOR_TOKENS, x.shape[1])
    return (whole[1:, 1:] - whole[1:, :1]).reshape(-1, x.shape[1])


class _Pool:
    """Values of many rows in units of their spread, by shape."""

    def __init__(self) -> None:
        self._values: list[list[Floats]] = [[] for _ in range(SHAPES)]

    def add(self, shape: int, values: Floats) -> None:
        """Takes the values of one row while there is room for its shape."""
        if len(self._values[shape]) < _POOLED_ROWS:
            every = max(1, len(values) // _POOLED_VALUES)
            self._values[shape].append(values[::every][:_POOLED_VALUES])

    def frequencies(self) -> npt.NDArray[np.uint16]:
        """`[CLASSES, 256]`; a shape that nothing has takes the values of its neighbour."""
        out = np.zeros((CLASSES, SYMBOLS), np.uint16)
        known = [shape for shape in range(SHAPES) if self._values[shape]]
        for shape in range(SHAPES):
            nearest = min(known, key=lambda k: abs(k - shape))
            values = np.concatenate(self._values[nearest])
            for scale in range(SCALES):
                q = np.rint(values * np.float32(2 ** ((scale - SCALE_ZERO) / 4)))
                said = q[np.abs(q) < SYMBOLS // 2].astype(np.int64) + SYMBOLS // 2
                counts = np.bincount(said, minlength=SYMBOLS)
                counts[0] = len(q) - len(said) + 1
                out[shape * SCALES + scale] = normalise(counts)
        return out


def _describe(y: Floats, region: int, into: _Spread, pool: _Pool) -> Floats:
    """Notes spread and shape of each column of `y`, `[tokens, D]`; `y` in units of the spread."""
    absolute = np.abs(y).mean(0) * _NORMAL + _TINY
    exponent = np.clip(np.rint(4 * np.log2(absolute)), -400, 400).astype(np.int16)
    peaked = np.sqrt(np.square(y).mean(0)) / absolute
    shapes = np.searchsorted(_PEAKED, peaked).astype(np.uint8)
    into.exponent[region], into.shape[region] = exponent, shapes
    scaled: Floats = y / np.exp2(exponent / 4).astype(np.float32)
    for column, shape in enumerate(shapes):
        pool.add(int(shape), scaled[:, column])
    return scaled
