"""What changed between two sweeps, and which changes fail a build."""
