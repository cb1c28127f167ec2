"""`python -m drq` is the `drq` command."""

import os
import sys


def main() -> None:
    """The command, which is quiet about a Ctrl-C while it is imported too."""
    try:
        from drq.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    # Python puts the current folder first: what lies in somebody's run folder would pass for our modules.
    if sys.path[0] == os.getcwd():
        del sys.path[0]
    main()
