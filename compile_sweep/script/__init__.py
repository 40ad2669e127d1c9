"""A person's own training script, run unchanged and measured under compile settings, or trained with a winner applied."""
