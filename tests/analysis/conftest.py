"""Fixtures of tests that read sweep folders."""

from sweep_folders import make_sweep as make_sweep
from sweep_folders import report_on as report_on
from sweep_folders import two as two
