"""The two programs that SciCode runs in the sandbox: one computes targets from the ground truth, one checks an answer.

A test is Python text that asserts something about `target`. Where that is not known, it is what the ground truth gives
for the expression that stands opposite to it: the other argument of a comparing function, the other side of ==; or, of
a tuple, what stands opposite to each of target[0], target[1], ... A test that knows its own answer has no target.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tests import the package's own comparisons; these have the same names and stand in their place.
COMPARISONS = """
def _mk_install():
    import sys, types
    import numpy as np
    def dense(value):
        return value.toarray() if hasattr(value, "toarray") else value
    def same(a, b):
        a, b = dense(a), dense(b)
        if isinstance(a, dict) and isinstance(b, dict):
            a = {str(key): value for key, value in a.items()}
            b = {str(key): value for key, value in b.items()}
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
        if isinstance(a, (str, set, type(None))) or isinstance(b, (str, set, type(None))):
            return a == b
        try:
            return bool(np.allclose(a, b))
        except (TypeError, ValueError):
            return bool(np.all(str(a) == str(b))) if not isinstance(a, (list, tuple)) else a == b
    package, compare = types.ModuleType("scicode"), types.ModuleType("scicode.compare")
    module = types.ModuleType("scicode.compare.cmp")
    module.cmp_tuple_or_list = module.are_dicts_close = module.are_csc_matrix_close = same
    sys.modules.update({"scicode": package, "scicode.compare": compare, "scicode.compare.cmp": module})
    return same
_mk_same = _mk_install()
"""

_TARGETS = """
import ast as _mk_ast, base64 as _mk_base64, pickle as _mk_pickle, zlib as _mk_zlib

def _mk_value(test, scope):
    found = {}
    for node in _mk_ast.parse(test).body:
        if isinstance(node, _mk_ast.Assert) and "target" in {getattr(n, "id", None) for n in _mk_ast.walk(node)}:
            for expression, index in _mk_opposites(node.test):
                found[index] = eval(compile(_mk_ast.Expression(expression), "test", "eval"), scope)
        else:
            exec(compile(_mk_ast.Module([node], []), "test", "exec"), scope)
    if not found and "target" in test:
        raise ValueError("nothing stands opposite to target: " + test)
    return found.get(None) if None in found or not found else tuple(found[index] for index in sorted(found))

def _mk_index(node):
    # whether a node is target (None) or target[index]; False if neither
    if isinstance(node, _mk_ast.Name) and node.id == "target":
        return None
    if isinstance(node, _mk_ast.Subscript) and _mk_index(node.value) is None:
        return node.slice.value
    return False

def _mk_opposites(test):
    for part in _mk_ast.walk(test):
        if isinstance(part, _mk_ast.Call) and len(part.args) >= 2:
            pair = part.args[:2]
        elif isinstance(part, _mk_ast.Compare) and len(part.ops) == 1:
            pair = [part.left, part.comparators[0]]
        else:
            continue
        for one, other in (pair, pair[::-1]):
            index = _mk_index(one)
            if index is not False:
                yield other, index

_mk_found = [_mk_value(test, globals()) for test in _mk_tests]
print()
print(_mk_base64.b64encode(_mk_zlib.compress(_mk_pickle.dumps(_mk_found))).decode())
"""

_CHECK = """
import pickle as _mk_pickle
with open("targets.pickle", "rb") as _mk_file:
    _mk_targets = _mk_pickle.load(_mk_file)
for _mk_test, target in zip(_mk_tests, _mk_targets, strict=True):
    exec(compile(_mk_test, "test", "exec"), globals())
print()
print({passed!r})
"""


def target_program(dependencies: str, code: Sequence[str], tests: Sequence[str]) -> str:
    """Prints, as the last word, the list of one target a test, pickled, deflated, in base64."""
    return "\n\n".join([COMPARISONS, dependencies, *code, f"_mk_tests = {list(tests)!r}", _TARGETS])


def check_program(dependencies: str, code: Sequence[str], tests: Sequence[str], passed: str) -> str:
    """Reads the targets from targets.pickle, runs every test, and prints `passed` if none fails."""
    return "\n\n".join([COMPARISONS, dependencies, *code, f"_mk_tests = {list(tests)!r}", _CHECK.format(passed=passed)])
