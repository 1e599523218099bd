"""`python -m lipflow`, and so `torchrun -m lipflow`."""

import sys

from lipflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
