"""The vLLM connector: `kv_connector_module_path: kvist.connectors.vllm`.

`KvistConnector` is imported on first use, so that the plugin entry point costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.connectors.vllm.connector import KvistConnector

__all__ = ["KvistConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvistConnector":
        from kvist.connectors.vllm.connector import KvistConnector

        return KvistConnector
    raise AttributeError(name)
