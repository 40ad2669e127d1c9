"""Files at a path or URI, and the mirror of a sweep's folder there."""
