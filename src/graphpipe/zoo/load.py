"""Finds the job that a user names: ``zoo:NAME`` or ``path/to/file.py:factory``.

Naming a file is the only way in which GraphPipe runs code that it did not bring along.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from graphpipe.errors import GraphPipeError, InputError
from graphpipe.zoo.job import Job

_WAYS = "Name a model as zoo:NAME or as path/to/file.py:factory"


def load_job(name: str) -> Job:
    """The job of a model's name.

    Args:
        name: ``zoo:NAME``, or a Python file and a function in it without arguments that
            returns a :class:`~graphpipe.zoo.job.Job` (or a job itself). The file's folder
            is importable while it runs, as if the file had been started.

    Raises:
        InputError: If there is no such model, file or function, if the file fails, or if
            the function returns something else.
    """
    place, separator, what = name.rpartition(":")
    if not separator or not place or not what:
        raise InputError("This is not the name of a model", got=repr(name), fix=_WAYS)
    return _from_zoo(what) if place == "zoo" else _from_file(Path(place), what)


def _from_zoo(name: str) -> Job:
    from graphpipe.zoo.registry import ZOO

    entry = ZOO.get(name)
    if entry is None:
        close = difflib.get_close_matches(name, ZOO, n=1)
        raise InputError(
            "The zoo has no model of this name",
            expected=f"one of {', '.join(ZOO)}",
            got=repr(name),
            fix=f"Did you mean zoo:{close[0]}" if close else _WAYS,
        )
    return entry.make()


def _from_file(path: Path, factory: str) -> Job:
    module = _run(path)
    found = getattr(module, factory, None)
    if found is None:
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        own = [key for key in sorted(public) if getattr(module, key).__module__ == module.__name__]
        raise InputError(
            f"The file has no function {factory!r}",
            where=str(path),
            expected=f"one of {', '.join(own)}" if own else None,
            fix="Name a function without arguments that returns a graphpipe.Job",
        )
    if callable(found) and not isinstance(found, Job):
        try:
            found = found()
        except GraphPipeError:
            raise
        except Exception as error:
            raise InputError(
                f"The factory failed with {type(error).__name__}: {error}",
                where=f"{path}:{factory}",
                fix="The factory is called without arguments; --debug shows where it failed",
            ) from error
    if not isinstance(found, Job):
        raise InputError(
            "The factory returned something else than a job",
            where=f"{path}:{factory}",
            expected="graphpipe.Job(model, args, kwargs, targets, loss_fn, data)",
            got=type(found).__name__,
        )
    return found


def _run(path: Path) -> ModuleType:
    """Imports the file under a name of its own; the same file is run once a process."""
    target = path.resolve()
    if target.suffix != ".py" or not target.is_file():
        raise InputError(
            "There is no such Python file", where=str(path), got=repr(str(path)), fix=_WAYS
        )
    name = f"graphpipe_user_{target.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(target):
        return known
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(target.parent))
    try:
        spec.loader.exec_module(module)
    except GraphPipeError:
        del sys.modules[name]
        raise
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise InputError(
            f"The file failed with {type(error).__name__}: {error}",
            where=str(path),
            fix="Run it with python to see where; --debug shows the traceback too",
        ) from error
    finally:
        sys.path.remove(str(target.parent))
    return module
