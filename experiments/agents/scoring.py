"""Run a task's own test over the folder that an agent left: `python -I scoring.py TEST`, in that folder.

The last line that it prints is {"ran": tests, "failed": what did not pass in them, each subtest alone}. The folder
stands behind the standard library on the path, so that no file in there takes the place of one of its modules.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from importlib.util import module_from_spec, spec_from_file_location


def main(path: str) -> None:
    sys.path.append(os.getcwd())
    spec = spec_from_file_location("scoring_test", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(module))
    not_passed = (*result.failures, *result.errors, *result.skipped, *result.expectedFailures)
    failed = len(not_passed) + len(result.unexpectedSuccesses)
    print("\n" + json.dumps({"ran": result.testsRun, "failed": failed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
