"""One run of a suite in a process of its own: `python -m drq.launch.worker`, told what to do on standard input.

The first line of the input is the job. Its end means that the launcher has ended: the run is then left as by Ctrl-C,
so that nothing goes on in secret when a launcher is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from drq.errors import UserError
from drq.launch.pools import STOPPED


def main() -> int:
    """Trains one run; a user's mistake is one sentence and exit code 2."""
    # Training turns the first signal into a checkpoint; before and after, it unwinds and finishes what it writes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
        from drq.training.folder import config_from_json
        from drq.training.loop import train

        train(config_from_json(job["config"]), label=job["label"])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return STOPPED
    return 0


def _stop_at_end_of_input() -> None:
    # A thread that waits inside a buffered reader would hold its lock at the interpreter's exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
