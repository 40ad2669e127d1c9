"""What the compiler did: graph breaks, recompiles, coverage, and advice on them."""
