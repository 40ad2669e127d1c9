"""`compile-sweep` and `python -m orchestrator`: imports the commands where Ctrl-C shows no traceback, as that takes a while."""

import sys

STOPPED = 130  # as in `compile_sweep.command_line`, whose imports are part of what takes a while


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        from orchestrator.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
