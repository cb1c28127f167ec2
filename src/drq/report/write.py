"""`drq report`: one page, table or figure out of run folders and other people's CSVs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from drq.errors import UserError, format_of
from drq.report.export import WRITERS
from drq.report.page import write_page
from drq.report.results import CSV_COLUMNS, missing_runs, read_results
from drq.training.folder import unfinished_name

Format = Literal["html", "csv", "md", "tex", "png"]


def report(dirs: Sequence[Path], out: Path, *, format: Format | None = None) -> list[str]:
    """Writes the report on all runs under `dirs` (folders at any depth, or CSVs) to `out`, by default as its name ends.

    Returns what the reader should know: every file or run that was left out or is not complete, by name.
    """
    if format not in (None, *get_args(Format)):
        raise UserError(f"There is no format {format}; choose one of {', '.join(get_args(Format))}.")
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file, such as --out {out / 'report.html'}.")
    chosen = format or format_of(out, get_args(Format))
    paths = [Path(path) for path in dirs]
    runs, warnings = read_results(paths)
    if not any(len(run.steps) for run in runs):
        found = "; ".join(warnings[:3]) or "no folder was given"
        raise UserError(
            f"Nothing to report ({found}); give folders made by `drq train` or `drq suite run`, or a CSV with columns "
            f"{','.join(CSV_COLUMNS)}."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    missing = missing_runs(runs, paths)
    # The report of before stays until this one is whole. A link or a device is written to as it is.
    direct = out.is_symlink() or (out.exists() and not out.is_file())
    unfinished = out if direct else unfinished_name(out)
    try:
        if chosen == "html":
            write_page(runs, warnings, missing, unfinished)
        else:
            WRITERS[chosen](runs, missing, unfinished)
        if not direct:
            os.replace(unfinished, out)
    except OSError as error:
        if not direct:
            with suppress(OSError):  # where nothing may be written, nothing was
                unfinished.unlink()
        raise UserError(
            f"{out} could not be written ({error.strerror or error}): see that its folder has room and may be written, "
            "or choose another --out."
        ) from error
    return warnings
