"""Values as they may be shown."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(?<=://)([^/?#@:]*):[^/?#]*@")


def without_password(text: str) -> str:
    """`text`, with the password of a URL in it starred out."""
    return _PASSWORD.sub(r"\1:***@", text)
