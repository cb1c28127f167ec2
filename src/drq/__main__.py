"""`python -m drq` is the `drq` command."""

import os
import sys

# Python puts the current folder first: what lies in somebody's run folder would pass for our modules.
if sys.path[0] == os.getcwd():
    del sys.path[0]

from drq.cli import main

main()
