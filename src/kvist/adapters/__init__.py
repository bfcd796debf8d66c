"""Storage adapters: objects by name on one medium each, and the layers that wrap any of them."""
