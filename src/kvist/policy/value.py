"""The value policy: C++ where `kvist.native` has it, else its twin, which is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.native import IMPLEMENTATION

if TYPE_CHECKING:
    from kvist.policy.value_twin import Value
elif IMPLEMENTATION == "native":
    from kvist.policy.value_native import Value
else:
    from kvist.policy.value_twin import Value

__all__ = ["Value"]
