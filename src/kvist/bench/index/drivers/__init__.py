"""Programs that measure one index each, in an environment of their own; alike but for the index."""
