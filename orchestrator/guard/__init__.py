"""Deadlines, progress, cores and neighbors: keeps one trial from harming the others."""
