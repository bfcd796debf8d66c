"""The `kvist` command: one file a command."""
