"""Why something is not compiled, is recompiled, fails or is not faster, and what helps: one table that every view reads."""
