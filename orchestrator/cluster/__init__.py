"""Placement of trials in a cluster, and what workers on other hosts send to the head."""
