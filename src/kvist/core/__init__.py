"""What a block, a key, a layout, a lease, an event, an error is. Standard library only."""
