"""`python -m covprop`: the command line."""

import sys

from covprop.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
