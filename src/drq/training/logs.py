"""Where numbers go: CSV files, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drq.errors import UserError, install_command, reason
from drq.training.folder import INFO, RunFolder, unwritable, write_atomically


class CsvLog:
    """A CSV file that can be cut back to an earlier length, so that a resumed run does not repeat rows."""

    def __init__(self, path: Path, size: int, rows: int | None = None) -> None:
        """Opens the file as it was when it had `size` bytes, or, where that is known, so many rows: a file that was
        given more columns since has other bytes."""
        self.path = path
        self.rows = 0
        self.notice: str | None = None
        """What was wrong with it."""
        self._columns: list[str] | None = None
        try:
            with open(path, "ab+") as file:
                file.seek(0)
                lines = (file.read() if rows is not None else file.read(size)).splitlines(keepends=True)
                if rows is not None:
                    lines = lines[: rows + 1 if rows else 0]
                if lines and not lines[-1].endswith(b"\n"):
                    lines.pop()  # half a row: the next would be joined to it
                whole = sum(map(len, lines))
                file.truncate(whole)
            self.rows = max(len(lines) - 1, 0)
            if whole < size if rows is None else self.rows < rows:
                missing = f"{size - whole:,} bytes" if rows is None else f"{rows - self.rows:,} rows"
                self.notice = f"{path} is {missing} shorter than the checkpoint left it: rows are lost."
            if lines:
                self._columns = next(csv.reader([lines[0].decode(errors="replace")]), None)
            if self._columns is not None and "env_step" not in self._columns:
                raise UserError(f"{path} does not begin with the names of its columns: restore it, or delete it.")
            self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise UserError(unwritable(path, error)) from error

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; the first decides the columns, but for those of an environment's `info`, which may come
        later."""
        try:
            if self._columns is None:
                self._columns = list(row)
                csv.writer(self._file).writerow(self._columns)
            elif new := [name for name in row if name.startswith(INFO) and name not in self._columns]:
                self._columns += new
                self._file.close()
                self._rewrite(empty=len(new))
                self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (closed by `close`)
            csv.writer(self._file).writerow([row.get(column, "") for column in self._columns])
            self._file.flush()
            self.rows += 1
        except OSError as error:
            raise UserError(unwritable(self.path, error)) from error

    def _rewrite(self, empty: int) -> None:
        """The same rows under the new columns, so many of them empty; as a whole, since a crash may come."""
        with open(self.path, encoding="utf-8", newline="") as file:
            _, *rows = csv.reader(file)
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self._columns or [], *(row + [""] * empty for row in rows)])
        write_atomically(self.path, text.getvalue())

    @property
    def size(self) -> int:
        self._file.flush()
        return self.path.stat().st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, where `write` has said so
            self._file.close()


class Logs:
    """All logs of a run."""

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        *,
        wandb: bool,
        sizes: dict[str, int],
        eval_rows: int | None,
        resumed_at: int | None,
    ) -> None:
        """`sizes`: the bytes of each CSV to go on from; `eval_rows`: the rows of eval.csv, where they are known.
        `resumed_at`: the env step of a run that goes on."""
        self.train = CsvLog(folder.train_csv, sizes["train"])
        self.eval = CsvLog(folder.eval_csv, sizes["eval"], eval_rows)
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        self._tensorboard = _tensorboard(folder, None if resumed_at is None else resumed_at + 1)
        self._wandb = _wandb(folder, config) if wandb else None

    @property
    def notices(self) -> list[str]:
        return [log.notice for log in (self.train, self.eval) if log.notice]

    def log_train(self, row: dict[str, Any]) -> None:
        self.train.write(row)
        self._elsewhere("train", row)

    def log_eval(self, row: dict[str, Any]) -> None:
        self.eval.write(row)
        self._elsewhere("eval", row)

    def sizes(self) -> dict[str, int]:
        """What a checkpoint keeps, to cut the files back to."""
        return {"train": self.train.size, "eval": self.eval.size}

    def close(self) -> None:
        self.train.close()
        self.eval.close()
        self._to_tensorboard(lambda writer: writer.close())
        threading.excepthook = self._hook
        if self._wandb is not None:
            self._wandb.finish()

    def _elsewhere(self, group: str, row: dict[str, Any]) -> None:
        env_step = int(row["env_step"])
        named = {f"{group}/{key}": float(value) for key, value in row.items() if key != "env_step" and value != ""}
        self._to_tensorboard(lambda writer: [writer.add_scalar(key, value, env_step) for key, value in named.items()])
        if self._wandb is not None:
            self._wandb.log(named | {"env_step": env_step})

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Without the trace of TensorBoard's writer, of which `_to_tensorboard` has a sentence."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            self._hook(failed)

    def _to_tensorboard(self, write: Callable[[Any], object]) -> None:
        """What cannot be written there, on a full disk, is in the CSV files: it is said, and the run goes on."""
        if self._tensorboard is not None:
            try:
                write(self._tensorboard)
            except Exception as error:  # whatever its writer, a thread, has raised
                self._tensorboard = None
                print(f"TensorBoard's files are not written any more ({error}); the CSV files are.", file=sys.stderr)


def _tensorboard(folder: RunFolder, purge_from: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder.tensorboard), purge_step=purge_from)
    except ImportError:
        return None  # an installation without it still trains
    except OSError as error:
        print(f"TensorBoard's files are not written ({error}); the CSV files are.", file=sys.stderr)
        return None


def require_wandb() -> None:
    """Refuses --wandb where its package is missing, before anything is written."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError(f"--wandb needs its package: {install_command('wandb')}, or leave --wandb out.")


def _wandb(folder: RunFolder, config: dict[str, Any]) -> Any:
    import wandb

    # The same folder continues the same record; its address is what identifies a run.
    identity = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:16]
    name = f"{config['task']} {config['preset']} {config['seed']}"
    about = {key.removeprefix("wandb_"): value for key, value in config.items() if key.startswith("wandb_")}
    mode = "offline" if about.pop("offline") else None  # None: as WANDB_MODE says, or online
    where = {"dir": str(folder.path), "id": identity, "name": name, "resume": "allow"}
    try:
        return wandb.init(**about, **where, mode=mode, config=config)
    except Exception as error:  # no key, no network, no such project: errors of its own
        raise UserError(
            f"Weights & Biases did not begin ({reason(error)}): `wandb login`, --wandb-offline, or leave --wandb out."
        ) from error
