"""Blend: text cached anywhere is found again, moved to where it stands now, and repaired."""
