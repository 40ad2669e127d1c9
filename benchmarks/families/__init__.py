"""Families of models and forms of training, each in as many lines as a user writes. The table is in docs/workloads.md."""
