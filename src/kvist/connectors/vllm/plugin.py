"""vLLM's plugin entry point: makes `"kv_connector": "KvistConnector"` enough."""

from __future__ import annotations


def register() -> None:
    """Registers the connector with vLLM's factory; harmless when it is there already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvistConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvistConnector", "kvist.connectors.vllm", "KvistConnector"
        )
