"""A table bound to a level and a layout: the arrays that coding needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvist.codec.cachegen.levels import Family, Level
from kvist.codec.cachegen.table import SCALE_ZERO, SCALES, ProfileTable, TableShape
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout
from kvist.native import CachegenPlan, RowCoder
from kvist.native.cachegen_twin import MAX_SHIFT

_QUARTERS = 4


def row_classes(
    exponent: npt.NDArray[np.int64], shape: npt.NDArray[np.uint8]
) -> tuple[bytes, bytes]:
    """Class and shift of rows whose spread is 2^(exponent / 4) steps."""
    beyond = np.maximum(0, exponent - (SCALES - 1 - SCALE_ZERO))
    shift = np.minimum(-(-beyond // _QUARTERS), MAX_SHIFT)
    scale = np.clip(exponent - _QUARTERS * shift + SCALE_ZERO, 0, SCALES - 1)
    classes = shape.astype(np.int64) * SCALES + scale
    return classes.astype(np.uint8).tobytes(), shift.astype(np.uint8).tobytes()


def check_shape(table: ProfileTable, layout: BlockLayout) -> None:
    """Proves that a table is of a layout's model.

    Raises:
        ConfigError: it is of another, or the dtype is none that cachegen codes.
    """
    if table.shape != TableShape.of(layout):
        raise ConfigError(
            f"a cachegen table of {table.shape} for {TableShape.of(layout)}",
            remedy="profile this model: kvist codec profile MODEL",
        )
    if layout.dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"cachegen codes no {layout.dtype}", remedy="choose the codec lossless")


def tuned_plan(table: ProfileTable, level: Level, layout: BlockLayout) -> CachegenPlan:
    """The plan of a level of the tuned family.

    Raises:
        ConfigError: see `check_shape`; or the table's basis has no inverse.
    """
    check_shape(table, layout)
    assert level.family is Family.TUNED
    shape = table.shape
    exponent = table.gauge + _QUARTERS * (level.rank - 1)
    step = np.float64(2.0) ** (exponent / _QUARTERS)
    rows = table.row_exponent.ravel().astype(np.int64) - exponent
    classes, shifts = row_classes(rows, table.row_shape.ravel())
    directions = table.basis.astype(np.float64) / 127
    try:
        # x = directionsᵀ q: [direction, channel] turned over, as the kernels read it.
        inverse = np.linalg.inv(directions)
    except np.linalg.LinAlgError as exc:
        raise ConfigError("a cachegen table whose basis has no inverse") from exc
    weight = table.weight.astype(np.float64)
    analysis = inverse * weight[:, :, None] / step
    kind = np.arange(shape.regions) // shape.kv_heads % shape.kinds
    return CachegenPlan(
        table.frequencies.astype("<u2").tobytes(),
        classes,
        shifts,
        dim=shape.head_dim,
        dtype=layout.dtype,
        analysis=analysis.astype("<f4").tobytes(),
        basis=table.basis.astype("<i1").tobytes(),
        scale=(step / weight / 127).astype("<f4").tobytes(),
        mean=table.mean.astype("<f4").tobytes(),
        inverse_spread=np.exp2(-rows / _QUARTERS).astype("<f4").tobytes(),
        turned=((kind == 0) & (len(table.inv_freq) > 0)).astype(np.uint8).tobytes(),
        pairs=len(table.inv_freq),
        limit=table.strange,
    )


def anchor_rows(table: ProfileTable, level: Level) -> tuple[RowCoder, npt.NDArray[np.float32]]:
    """The rows of a level of the paper's family, and the steps `[layers, kinds]` of its deltas.

    Bins are fixed multiples of how far deltas spread in a layer and kind, and widen with depth:
    by thirds of the layers 1, √2 and 2 times. Each level doubles them.
    """
    assert level.family is Family.PAPER
    shape = table.shape
    third = np.arange(shape.layers) * 3 // shape.layers
    wider = 2 * third + _QUARTERS * (level.rank - 5)  # in quarter octaves, by layer
    rows = table.delta_exponent.astype(np.int64).reshape(shape.layers, -1) - wider[:, None]
    coder = RowCoder(
        table.frequencies.astype("<u2").tobytes(),
        *row_classes(rows.ravel(), table.delta_shape.ravel()),
    )
    steps = table.delta_step.astype(np.float64) * np.exp2(wider / _QUARTERS)[:, None]
    return coder, steps.astype(np.float32)
