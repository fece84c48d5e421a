"""Runs the command line: python -m laminar."""

import sys

from laminar.cli import main

sys.exit(main())
