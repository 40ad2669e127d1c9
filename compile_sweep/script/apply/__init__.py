"""How settings change a running script: its modules, its optimizers, its losses and how it calls them."""
