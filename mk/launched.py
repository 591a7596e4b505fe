"""`run.py -m ... hydra/launcher=NAME`: the combinations of a sweep as jobs of one of Hydra's launchers.

joblib runs several at once in processes of this machine, submitit on a SLURM cluster (submitit_local: here), ray on a
Ray cluster. Each is an extra of this project. A job composes its configuration and runs its experiment as `run.py` does
one; it leaves its exit status, and a launcher its logs, in a folder of the sweep in run_dir.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from unittest import mock

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mk import compose
from mk.config import CONFIG_DIR
from mk.errors import MkError, tell
from mk.processes import below, children, processes
from mk.results import loggers
from mk.results.sources import ROOT

KEY = "hydra/launcher"
LAUNCHER_FAILED = 1  # with which Hydra ends the process, after it has printed why
PLUGINS = {  # of each launcher: the extra that has it
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
}
QUIET = (  # Hydra's own folders and logs: a run makes its own
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
    "hydra.sweep.subdir=.",
)


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those of the experiment, those of Hydra itself: `hydra/launcher=`, `hydra.launcher.n_jobs=`)."""
    own = [text for text in overrides if text.startswith(("hydra/", "hydra."))]
    return [text for text in overrides if text not in own], own


def check(overrides: Sequence[str], own: Sequence[str], multirun: bool) -> None:
    """Raises MkError for overrides of Hydra, `own`, that launch nothing, for a launcher that is unknown or not
    installed, and for combinations in an order that it would draw anew."""
    if not multirun:
        raise MkError(f"{own[0]}: one run is not launched", hint="-m, with values to combine")
    for override in filter(compose.is_shuffled, overrides):
        raise MkError(f"{override}: a launcher draws another order", hint=f"without shuffle, or without {KEY}=")
    chosen = [text.partition("=")[2] for text in own if text.startswith(f"{KEY}=")]
    other = [text for text in own if not text.startswith((f"{KEY}=", "hydra.launcher."))]
    if other or len(chosen) != 1:
        said = "two launchers" if len(chosen) > 1 else f"{(other or own)[0]}: only a launcher is taken from Hydra"
        raise MkError(said, hint=f"{KEY}={'|'.join(PLUGINS)}")
    if chosen[0] not in PLUGINS:
        raise MkError(f"unknown launcher {KEY}={chosen[0]}", hint=", ".join(PLUGINS))
    extra = PLUGINS[chosen[0]]
    if importlib.util.find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        raise MkError(f"{KEY}={chosen[0]} is not installed", hint=f"pip install -e '.[{extra}]'")


def launch(jobs: Sequence[Sequence[str]], overrides: Sequence[str], own: Sequence[str], run_dir: Path) -> list[int]:
    """The exit status of each combination, 1 for one that left none: a launcher that fails ends what it has not begun.

    jobs: every combination of `overrides`, in order. own: of `check`. What a job prints goes where its launcher has it.
    Raises MkError for a folder that cannot be made.
    """
    folder = (run_dir / f"{date.today().isoformat()}-launched-{secrets.token_hex(4)}").resolve()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise MkError(f"cannot make the sweep's folder {folder}: {error.strerror}") from error
    name = loggers.sweep_name(jobs)

    def task(_: DictConfig) -> None:
        _run(HydraConfig.get().overrides.task, name, folder / f"status-{HydraConfig.get().job.num}")

    where = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    arguments = [*map(compose.in_full, overrides), *QUIET, *own, f"hydra.sweep.dir='{where}'"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # of jobs that begin somewhere else
    environment = mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    try:
        with mock.patch.object(sys, "argv", [sys.argv[0], "--multirun", *arguments]), environment, _none_left():
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")(task)()
    except SystemExit as end:
        if end.code != LAUNCHER_FAILED:
            raise
    print(f"sweep folder: {folder}")
    statuses = [_status(folder / f"status-{number}") for number in range(len(jobs))]
    if any(statuses) and (folder / ".submitit").exists():
        print(f"what its jobs printed: {folder / '.submitit'}")
    return statuses


@contextlib.contextmanager
def _none_left() -> Iterator[None]:
    """Where this process is told to end, or its launcher fails, jobs that run on this machine end too."""
    others = children(processes())
    try:
        yield
    except BaseException:
        found = processes()
        for pid in below(children(found) - others, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def _run(job: Sequence[str], sweep: str, status: Path) -> None:
    """One combination, wherever it runs: nothing that it raises is the launcher's."""
    GlobalHydra.instance().clear()  # else nothing more could be composed
    loggers.begin_sweep(sweep)
    print(f"[{' '.join(job)}]", flush=True)
    with mock.patch.object(sys, "argv", ["run.py", *job]):  # which rows keep: the command of this one
        try:
            config = compose.load_config(list(job))
            found = compose.experiment_main(config.experiment.name)(config) or 0
        except Exception as error:
            found = tell(error, os.environ.get("MK_TRACEBACK") == "1" or "debug=true" in job)
    status.write_text(str(found))


def _status(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 1
