"""`python -m drq` is the `drq` command."""

import os
import sys


def main() -> None:
    """The command, which is quiet about a Ctrl-C while it is imported too, and says so where a package is missing."""
    try:
        from drq.cli import main

        main()
    except ModuleNotFoundError as error:
        from drq.machine import REQUIRED

        if error.name not in {needed.module.partition(".")[0] for needed in REQUIRED.values()}:
            raise
        print(f"drq: {error.name} is not installed: `python -m drq.doctor` says what to type.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    # Python puts the current folder first: what lies in somebody's run folder would pass for our modules.
    if sys.path[0] == os.getcwd():
        del sys.path[0]
    main()
