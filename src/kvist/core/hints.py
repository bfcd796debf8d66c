"""What is known of a request besides its tokens: how its generation ended and how long it was."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvist.core.keys import Key


class Finish(enum.IntEnum):
    """How the generation ended that follows a prompt. The numbers are those of `cls` in traces."""

    TOOL_USE = 0
    END_TURN = 1
    UNKNOWN = 2
    SUB_AGENT = 3


@dataclass(frozen=True, slots=True)
class Hints:
    """What the connector knows of a request; every field may stay unknown."""

    finish: Finish = Finish.UNKNOWN
    output_tokens: int | None = None
    partial: Key | None = None  # the prompt's last block, if it is not full
