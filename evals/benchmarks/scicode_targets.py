"""The numeric targets of SciCode's test split, from its HDF5 file (https://github.com/scicode-bench/SciCode).

Test k of step s is the group `s/testk`: of one variable that variable, of several a tuple in the order of their names.
A variable is a data set, or a group: `list` holds a list's items, `sparse_matrix` a matrix's parts, else it is a dict.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py

from mk.errors import MkError


def read_targets(path: Path, step: str, tests: int) -> bytes:
    """The targets of a step's tests as a pickled list. Raises MkError for a step that the file lacks."""
    with h5py.File(path, "r") as file:
        found = []
        for number in range(1, tests + 1):
            name = f"{step}/test{number}"
            if name not in file:
                raise MkError(f"{path} has no {name}")
            variables = [_value(variable) for variable in file[name].values()]
            found.append(variables[0] if len(variables) == 1 else tuple(variables))
    return pickle.dumps(found)


def _value(item: Any) -> Any:
    if hasattr(item, "keys"):
        if "list" in item:
            return [_value(part) for part in item["list"].values()]
        if "sparse_matrix" in item:
            return _sparse(item["sparse_matrix"])
        return {_key(name): _value(part) for name, part in item.items()}
    value = item[()]
    return value.decode() if isinstance(value, bytes) else value


def _key(name: str) -> float | str:
    """A dict's key: a number where it spells one."""
    try:
        return float(name)
    except ValueError:
        return name


def _sparse(group: Any) -> Any:
    from scipy import sparse

    part = {name: values[()] for name, values in group.items()}
    shape = tuple(part["shape"])
    if "row" in part:
        return sparse.coo_matrix((part["data"], (part["row"], part["col"])), shape=shape)
    compressed = (part["data"], part["indices"], part["indptr"])
    if "blocksize" in part:
        return sparse.bsr_matrix(compressed, shape=shape, blocksize=tuple(part["blocksize"]))
    return sparse.csr_matrix(compressed, shape=shape)
