"""Load generator, demo model and text, metrics, reports."""
