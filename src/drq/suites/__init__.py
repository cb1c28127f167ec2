"""What to run: the paper's experiments, and the user's own."""

from drq.suites.file import find_suite
from drq.suites.paper import SUITES
from drq.suites.search import as_toml, ranking
from drq.suites.suite import Run, Setting, Suite, slug

__all__ = ["SUITES", "Run", "Setting", "Suite", "as_toml", "find_suite", "ranking", "slug"]
