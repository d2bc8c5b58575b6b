"""`python -m batchsplit`."""

import sys

from batchsplit.cli import main

if __name__ == "__main__":
    sys.exit(main())
