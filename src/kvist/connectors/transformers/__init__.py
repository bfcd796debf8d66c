"""Kvist for Hugging Face Transformers: `TransformersKvist.open(model, store=…).generate(…)`."""

from kvist.connectors.transformers.session import Report, TransformersKvist, model_keyspace

__all__ = ["Report", "TransformersKvist", "model_keyspace"]
