"""Bounded pools of blocks, one package or file for each medium."""
