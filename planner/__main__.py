"""Command line: `python -m planner`, or `checkpoint-planner`."""

from __future__ import annotations

import sys

from planner.commands.run import main

if __name__ == "__main__":
    sys.exit(main())
