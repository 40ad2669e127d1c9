"""Where trials run in a cluster, and what reaches the head from other hosts."""
