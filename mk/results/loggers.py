"""Where rows go besides rows.jsonl. A logger is never the only place a result is kept, and never what fails a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from mk.config import Config, resolved

ONLINE_S = 15  # that W&B's server may take to answer; then the run is kept offline
FINISH_S = 60  # that uploading may take at the end
KEPT = ("rows.jsonl", "rows.csv", "raw.jsonl", "config.yaml", "meta.json")  # files of a run folder in its artifact
SAMPLES = ("samples.jsonl", "scores.jsonl", "report.json")  # and those of an evaluation
FOLDERS = {
    "WANDB_DATA_DIR": "data",
    "WANDB_CACHE_DIR": "cache",
    "WANDB_CONFIG_DIR": "config",
    "WANDB_ARTIFACT_DIR": "artifacts",
}

_own: set[str] = set()  # of FOLDERS, those that are set here
_sweep: str | None = None  # the group of runs that `run.py -m` makes together


def begin_sweep(name: str) -> None:
    """Runs from here on belong to one sweep."""
    global _sweep
    _sweep = name


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row as its JSON object."""

    def close(self, failed: bool) -> None:
        """Take the run's tables, figures and files, and flush; nothing is logged afterwards."""


class NullLogger:
    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


class WandbLogger:
    """Weights & Biases: a history step a row; a table of the rows, the figures and an artifact of the files at the end.

    All its files lie in the run folder. Offline needs neither account nor network; online, when the server does not
    answer in time or takes no key, the run goes on offline. Whatever fails in here is said once and ends the logging.
    """

    def __init__(self, cfg: Config, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._run: Any = None
        self._broken = False
        for name, part in FOLDERS.items():
            if name not in os.environ or name in _own:  # a user's stays
                _own.add(name)
                os.environ[name] = str(folder / "wandb" / part)
        self._safely(lambda: self._start(cfg))

    def _start(self, cfg: Config) -> None:
        import wandb

        def begin(mode: Literal["online", "offline"]) -> Any:
            return wandb.init(
                project=cfg.logger.project,
                name=self._folder.name,
                group=_sweep,
                job_type=cfg.experiment.name,
                mode=mode,
                dir=self._folder,
                config=resolved(cfg),
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    host="",
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    init_timeout=ONLINE_S,
                    finish_timeout=FINISH_S,
                ),
            )

        if cfg.logger.mode == "online":
            try:
                self._run = begin("online")
                return
            except (wandb.Error, OSError, ValueError) as error:
                wandb.teardown()
                self._run = begin("offline")
                way = Path(self._run.settings.sync_dir)
                print(
                    f"W&B is not reached ({_line(error)}): offline, later: wandb sync {way}",
                    file=sys.stderr,
                    flush=True,
                )
        else:
            self._run = begin("offline")

    def log(self, row: Mapping[str, Any]) -> None:
        step = len(self._rows)
        self._rows.append(dict(row))
        self._safely(lambda: self._run.log(dict(row), step=step))

    def close(self, failed: bool) -> None:
        self._safely(self._leave_files)
        self._safely(lambda: self._run.finish(exit_code=int(failed)))

    def _leave_files(self) -> None:
        import wandb

        figures = sorted(self._folder.glob("*.png"))
        if self._rows:
            columns = list(dict.fromkeys(name for row in self._rows for name in row))
            table = wandb.Table(columns=[*columns])
            for row in self._rows:
                table.add_data(*(_cell(row.get(name)) for name in columns))
            self._run.log({"rows": table}, step=len(self._rows))
        for path in figures:
            self._run.log({f"figures/{path.stem}": wandb.Image(str(path))}, step=len(self._rows))
        files = [*(path for name in (*KEPT, *SAMPLES) if (path := self._folder / name).exists()), *figures]
        artifact = wandb.Artifact(f"rows-{self._folder.name}", type="rows")
        for path in files:
            artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def _safely(self, action: Callable[[], Any]) -> None:
        """Does it, unless W&B failed before. Nothing that a tracker does may cost a run."""
        if self._broken:
            return
        try:
            action()
        except Exception as error:
            self._broken = True
            print(f"W&B failed and is left out: {_line(error)}", file=sys.stderr, flush=True)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def _cell(value: Any) -> Any:
    """A table's column holds one type: numbers, or text."""
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def make_logger(cfg: Config, folder: Path) -> Logger:
    return WandbLogger(cfg, folder) if cfg.logger.name == "wandb" else NullLogger()


def sweep_name(jobs: Sequence[Sequence[str]]) -> str:
    """Of the overrides of every combination: those that they all share are left out."""
    varied = sorted({text.split("=")[0] for job in jobs for text in job if any(text not in other for other in jobs)})
    return f"{len(jobs)} x {', '.join(varied) or 'the same'}"
