"""A discrete-event simulation of a cluster of engines: `spec` in, `report` out, by `cluster`."""
