"""Which settings a sweep tries: the space, recipes, and estimates of what they cost."""
