"""What came out: runs beside each other and beside the published figures."""

from drq.report.watch import WatchArguments, watch
from drq.report.write import Format, report

__all__ = ["Format", "WatchArguments", "report", "watch"]
