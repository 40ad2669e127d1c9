"""Torch's compile caches: their folders and bundles, their contents, and their transfer to another process."""
