"""Says in one sentence, with the remedy, why this Python cannot install the project; silent when it can.

Written so that any Python 3, however old, can read it: that is its purpose.
"""

import importlib.util
import sys

OLDEST = (3, 11)


def problem(version, has_module):
    """The sentence for a Python of this version; `has_module` tells which standard modules it has."""
    name = str(version[0]) + "." + str(version[1])
    if tuple(version[:2]) < OLDEST:
        return (
            "DrQ needs Python 3.11 or newer and this is " + name + ": install a newer one and name it, "
            "as in `make test PYTHON=python3.12`."
        )
    if not (has_module("venv") and has_module("ensurepip")):
        return (
            "This Python cannot make a virtual environment with pip in it: install its venv package (Debian, "
            "Ubuntu: `apt-get install python3-venv`, or python" + name + "-venv) and repeat the command."
        )
    return None


if __name__ == "__main__":
    sentence = problem(sys.version_info, lambda module: importlib.util.find_spec(module) is not None)
    if sentence is not None:
        sys.exit(sentence)
