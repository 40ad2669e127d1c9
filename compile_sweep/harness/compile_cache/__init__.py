"""torch's compile caches: their folders and bundles, what is in them, and how they move to another process."""
