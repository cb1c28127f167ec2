"""`python -m drq` is the `drq` command."""

from drq.cli import main

main()
