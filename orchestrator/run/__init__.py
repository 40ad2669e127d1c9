"""Runs a sweep: its folder, its stages, and each trial from its spec to its record."""
