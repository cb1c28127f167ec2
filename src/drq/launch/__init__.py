"""Where a suite runs: processes on this machine or tasks on a cluster, and how far they are."""

from drq.launch.launcher import SuiteRunArguments, list_suites, run_suite
from drq.launch.mps import daemon_of_others, start_mps
from drq.launch.pools import job_to_json
from drq.launch.process import start_worker
from drq.launch.prune import SuitePruneArguments, prune_suite
from drq.launch.status import folder_status, suite_status
from drq.launch.stores import local_copy
from drq.launch.suite_folder import SuiteFolder, SuiteRecord

__all__ = [
    "SuiteFolder", "SuitePruneArguments", "SuiteRecord", "SuiteRunArguments", "daemon_of_others", "folder_status",
    "job_to_json", "list_suites", "local_copy", "prune_suite", "run_suite", "start_mps", "start_worker", "suite_status",
]  # fmt: skip
