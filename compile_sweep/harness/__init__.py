"""Measures one setting in one process: applies it, times it, and checks its numbers."""
