"""The value policy in C++; only the arithmetic of a refresh, which is rare, stays in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from kvist.native._core import ValueOrder
from kvist.policy.hazard import AGE_SCALE, BUCKET_ENDS_S, FIRST_AGE_S, revised_values
from kvist.policy.value_twin import FRESH_CLASSES, GHOST_BLOCKS
from kvist.policy.weights import Weigh, weight_bucket


class Value(ValueOrder):
    """Evicts the leaf of least expected uses per block-second; see `value_twin`."""

    __slots__ = ()

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        ghost_blocks: int = GHOST_BLOCKS,
        weigh: Weigh | None = None,
    ) -> None:
        """An empty order; the arguments are those of the twin."""
        super().__init__(
            clock=clock,
            weigh=None if weigh is None else lambda key: weight_bucket(weigh(key)),
            revise=_revised,
            ghost_blocks=ghost_blocks,
            first_age_s=FIRST_AGE_S,
            age_scale=AGE_SCALE,
            age_ends_s=list(BUCKET_ENDS_S),
        )

    # Of these only the length is known here; the twin has what they hold.

    @property
    def _nodes(self) -> range:
        return range(self.remembered_blocks)

    @property
    def _duel(self) -> SimpleNamespace:
        return SimpleNamespace(_turns=range(self.shadow_turns))


def _revised(ended: bytes, waiting: bytes, known: Sequence[int]) -> npt.NDArray[np.float64]:
    """`revised_values` of the classes in `known`, whose `waiting` has the shape (ages, classes)."""
    return revised_values(
        np.frombuffer(ended).reshape(len(known), -1),
        np.frombuffer(waiting).reshape(-1, len(known)).T,
        np.array([cls in FRESH_CLASSES for cls in known]),
    )
