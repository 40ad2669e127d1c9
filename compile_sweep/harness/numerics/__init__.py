"""Checks that a compiled step computes the same as the eager one."""
