"""The front door: compose a configuration, check it, hand it to experiments/<name>.py (--help lists what there is)."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mk.config import Config

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"


def enter_environment() -> None:
    """Where the packages are missing, go on in .venv; without one, say which command makes it."""
    if importlib.util.find_spec("hydra") and importlib.util.find_spec("torch"):
        return
    python = VENV / "bin" / "python"
    if os.access(python, os.X_OK) and Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])
    print("error: the packages this needs are not installed\nhint: make run", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> argparse.Namespace:
    from mk.errors import MkError

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise MkError(message, hint="python run.py --help")

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(argv)


def run(argv: list[str], trace: bool) -> int:
    """One experiment, or with -m every combination, all of them composed before the first one starts.

    A combination that is refused or fails does not stop the others; the status is then the first one that is not 0.
    """
    args = parse(argv)
    from mk import compose, launched

    if args.help:
        print(compose.help_text())
        return 0
    overrides, of_hydra = launched.split(args.overrides)
    if of_hydra:
        launched.check(overrides, of_hydra, args.multirun)
    jobs = compose.expand_sweep(overrides) if args.multirun else [overrides]
    configs = [compose.load_config(job) for job in jobs]
    if args.cfg:
        print("---\n".join(compose.to_yaml(config) for config in configs), end="")
        return 0
    if of_hydra:
        statuses = launched.launch(jobs, overrides, of_hydra, Path(configs[0].run_dir))
    elif len(jobs) == 1:
        return compose.experiment_main(configs[0].experiment.name)(configs[0]) or 0
    else:
        statuses = in_turn(jobs, configs, trace)
    failed = {number: status for number, status in enumerate(statuses, start=1) if status}
    if not failed:
        return 0
    print(f"{len(failed)} of {len(jobs)} combinations failed: {', '.join(map(str, failed))}", file=sys.stderr)
    return next(iter(failed.values()))


def in_turn(jobs: list[list[str]], configs: list[Config], trace: bool) -> list[int]:
    """The exit status of each, one after the other in this process."""
    from mk import compose
    from mk.errors import tell
    from mk.results import loggers

    loggers.begin_sweep(loggers.sweep_name(jobs))
    statuses = []
    for number, (job, config) in enumerate(zip(jobs, configs, strict=True), start=1):
        print(f"[{number}/{len(jobs)}] {' '.join(job)}", flush=True)
        try:
            statuses.append(compose.experiment_main(config.experiment.name)(config) or 0)
        except BrokenPipeError:
            raise
        except Exception as error:
            statuses.append(tell(error, trace))
    return statuses


def main(argv: list[str]) -> int:
    """The exit status: 0, what the experiment returned, 2 for a wrong input, 1 for a defect, 130 for an interrupt."""
    from mk.errors import tell

    trace = os.environ.get("MK_TRACEBACK") == "1" or "debug=true" in argv
    try:
        return run(argv, trace)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `python run.py ... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return tell(error, trace)


def end_in_order() -> None:
    """Has what was started ended too where this is told to end, or its terminal is gone. What nohup set stays."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    enter_environment()
    end_in_order()
    sys.exit(main(sys.argv[1:]))
