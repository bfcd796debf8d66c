"""Asks a node about itself, ends it, starts one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvist.core.errors import FormatError, NodeAwayError, NodeRefusedError
from kvist.node import messages as m
from kvist.node.attachment import connect
from kvist.node.protocol import MOST_BYTES, Frames, decode_reply, encode

_RECEIVE_BYTES = 64 << 10
ASK_S = 10.0
START_S = 60.0


def ask(path: str | os.PathLike[str], what: str, *, deadline_s: float = ASK_S) -> dict[str, Any]:
    """What the node says to `status`, `check` or `drain`.

    Raises:
        NodeAwayError: no node listens there, or it did not answer within `deadline_s`.
        NodeRefusedError: it does not want to say.
    """
    frames = Frames(MOST_BYTES)
    with connect(os.fspath(path), deadline_s) as link:
        try:
            link.sendall(encode(m.Control(m.MAGIC, m.OLDEST_PROTOCOL, m.NEWEST_PROTOCOL, what)))
            while data := link.recv(_RECEIVE_BYTES):
                for body in frames.feed(data):
                    return _read(decode_reply(body))
        except (OSError, FormatError) as error:
            raise NodeAwayError(f"the node on {path} does not answer: {error}") from error
    raise NodeAwayError(f"the node on {path} hung up")


def _read(reply: m.Reply) -> dict[str, Any]:
    if isinstance(reply, m.Refused):
        raise NodeRefusedError(reply.reason, for_good=reply.for_good)
    if not isinstance(reply, m.Report):
        raise NodeAwayError(f"the node answers with {type(reply).__name__}")
    return msgspec.json.decode(reply.text, type=dict[str, Any])


def listens(path: str | os.PathLike[str]) -> bool:
    """Whether a node accepts connections there."""
    try:
        connect(os.fspath(path), ASK_S).close()
    except (NodeAwayError, NodeRefusedError):
        return False
    return True


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    """Runs a command that starts a node in the background and returns when it listens.

    Raises:
        NodeAwayError: it did not within a minute, or it failed; the text ends as its output did.
    """
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeAwayError(f"no node could be started (see {log}): {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        cause = said[-1] if said else f"exit code {done.returncode}"
        raise NodeAwayError(f"no node could be started (see {log}): {cause}")
