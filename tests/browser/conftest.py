"""Fixtures of tests that open reports in a browser."""

from sweep_folders import make_sweep as make_sweep
from sweep_folders import report_on as report_on
