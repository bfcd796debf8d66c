"""Less work with the KV that is there: reuse that is not a prefix."""
