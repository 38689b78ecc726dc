"""``python -m fxfuse``."""

import sys

from fxfuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
