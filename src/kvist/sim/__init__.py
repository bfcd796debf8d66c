"""What would happen: traces, and policies replayed on them."""
