"""``python -m roundpipe``: the same as the command ``roundpipe``."""

from __future__ import annotations

import sys

from roundpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
