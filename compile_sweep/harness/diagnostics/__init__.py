"""What the compiler did: graph breaks, recompiles, coverage, and advice about them."""
