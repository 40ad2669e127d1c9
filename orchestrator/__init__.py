"""Plans a sweep, runs its trials on Ray, and records what each one measured."""

import os
import sys

# `python -m orchestrator.sweep` puts the current folder first on the import path, where a user's rich.py would hide the package.
if sys.argv[0] == "-m" and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
    sys.path.append(sys.path.pop(0))

__all__: list[str] = []
