"""Run a task's own test over the folder that an agent left: `python -I scoring.py TEST VERDICT`, in that folder.

VERDICT holds a nonce. It is read and taken away before anything of the folder is imported, and at the end gets
{"nonce", "ran": tests, "failed": what did not pass in them, each subtest alone} by who still has it open: what the
folder's code prints, or where it ends the process, is no verdict. It runs in the same process all the same, so that
code which sets out to change the test's result can. The folder stands behind the standard library on the path, so that
no file in there takes the place of one of its modules.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import unittest
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def main(path: str, verdict: str) -> None:
    with open(verdict, "r+") as file:
        nonce = file.read()
        os.unlink(verdict)
        del sys.argv[1:]
        sys.path.append(os.getcwd())
        spec = spec_from_file_location("scoring_test", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(module))
        not_passed = (*result.failures, *result.errors, *result.skipped, *result.expectedFailures)
        failed = len(not_passed) + len(result.unexpectedSuccesses)
        file.seek(0)
        file.write(json.dumps({"nonce": nonce, "ran": result.testsRun, "failed": failed}))
        file.truncate()


def tests_in(path: Path) -> int:
    """Tests of a file, nothing of which is imported: the methods `test...` of its classes."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test") for each in classes for node in each.body
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
