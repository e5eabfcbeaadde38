"""`python -m eventbus_engine`: the command line."""

from __future__ import annotations

import sys

from eventbus_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
