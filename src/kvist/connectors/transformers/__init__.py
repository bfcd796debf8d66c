"""Kvist for Hugging Face Transformers: `TransformersKvist.open(model, store=…).generate(…)`."""

from kvist.connectors.transformers.blend import BlendOutcome, BlendReport, BlendSettings
from kvist.connectors.transformers.session import Report, TransformersKvist, model_keyspace

__all__ = [
    "BlendOutcome",
    "BlendReport",
    "BlendSettings",
    "Report",
    "TransformersKvist",
    "model_keyspace",
]
