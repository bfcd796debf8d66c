"""What the remotes move, beside their plain clients."""
