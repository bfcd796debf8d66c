"""Looking after a node's blocks: what `kvist cache` and HTTP ask, and the node answers."""
