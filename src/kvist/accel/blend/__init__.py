"""Reuse of cached text that stands elsewhere in the prompt: find, relocate, repair."""
