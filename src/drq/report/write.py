"""`drq report`: one page, table or figure out of run folders and other people's CSVs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from drq.errors import UserError
from drq.report.export import WRITERS
from drq.report.page import write_page
from drq.report.results import CSV_COLUMNS, missing_runs, read_results

Format = Literal["html", "csv", "md", "tex", "png"]


def report(dirs: Sequence[Path], out: Path, *, format: Format = "html") -> list[str]:
    """Writes the report on all runs under `dirs` (folders at any depth, or CSVs) to `out`.

    Returns what the reader should know: every file or run that was left out or is not complete, by name.
    """
    if format not in get_args(Format):
        raise UserError(f"There is no format {format}; choose one of {', '.join(get_args(Format))}.")
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file, such as --out {out / f'report.{format}'}.")
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
    if format == "html":
        write_page(runs, warnings, missing, out)
    else:
        WRITERS[format](runs, missing, out)
    return warnings
