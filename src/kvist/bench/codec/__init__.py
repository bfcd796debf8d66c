"""Measures the codecs on the KV of a real model: size, and speed beside a copy of memory."""
