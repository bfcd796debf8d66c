"""The node: one process owns a host's store, engines attach to it over a Unix socket."""
