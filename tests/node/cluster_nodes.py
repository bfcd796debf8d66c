"""Real nodes that find each other through a shared folder, and what tests ask of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_process import NodeProcess, eventually
from peer_nodes import BLOCK_BYTES, BLOCKS, LONG_S, TIMEOUT_S, key


def token_file(folder: Path, name: str = "token") -> Path:
    """A file with a secret of its own."""
    path = folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def cluster_node(
    folder: Path,
    name: str,
    *,
    token: Path | None = None,
    replicas: int = 1,
    blocks: int = 4 * BLOCKS,
    ssd: bool = False,
    options: Sequence[str] = (),
) -> NodeProcess:
    """A node that finds others through a folder in `folder`, on ports that the system chooses."""
    sets = [
        f"store.dram.capacity={blocks * BLOCK_BYTES}",
        "node.peers.listen=127.0.0.1:0",
        f"node.peers.timeout_s={TIMEOUT_S}",
        "node.peers.retry_s=0.1",
        "node.cluster.discovery=files",
        f"node.cluster.folder={folder / 'found'}",
        f"node.cluster.name={name}",
        f"node.cluster.replicas={replicas}",
        *options,
    ]
    if token is not None:
        sets.append(f"node.peers.token_file={token}")
    return NodeProcess(
        folder / f"{name}.sock",
        ssd=folder / name if ssd else None,
        options=tuple(f"--set={text}" for text in sets),
    )


def cluster_of(node: NodeProcess) -> dict[str, Any]:
    """What a node says of its cluster."""
    return dict(node.status()["cluster"])


def sample(node: NodeProcess, name: str) -> float:
    """A figure of a node's cluster."""
    return float(cluster_of(node)["samples"][name])


def met(*nodes: NodeProcess) -> None:
    """Each takes part, and all know that of all."""
    for node in nodes:

        def knows_all(node: NodeProcess = node) -> bool:
            cluster = cluster_of(node)
            others = list(cluster["nodes"].values())
            return [cluster["state"], *others] == ["active"] * len(nodes)

        eventually(knows_all, LONG_S)


def keys(numbers: Sequence[int]) -> list[bytes]:
    """Keys of blocks."""
    return [key(n) for n in numbers]
