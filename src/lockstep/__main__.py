"""Makes ``python -m lockstep`` run the ``lockstep`` command."""

import sys

from lockstep.cli import command

if __name__ == "__main__":
    sys.exit(command())
