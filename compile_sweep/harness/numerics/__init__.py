"""Checks that a compiled step computes what the eager one does."""
