"""Which setting to choose: fronts, uncertainty, break-even, attribution."""
