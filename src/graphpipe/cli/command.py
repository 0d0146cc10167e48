"""What all commands share: ``--json``, ``--quiet``, ``--debug``, and how errors are told."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from graphpipe.cli.output import Output
from graphpipe.errors import GraphPipeError

_COMMON = (
    inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("--json", help="Print the result as one JSON document.")
        ],
    ),
    inspect.Parameter(
        "quiet",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("--quiet", "-q", help="Print errors and --json results only.")
        ],
    ),
    inspect.Parameter(
        "debug",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
    ),
)


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as the command ``name``, with the options that all have.

    The function's first parameter is the :class:`Output`; the others become options. An
    error is told in one paragraph on standard error, and the exit code is 1 (2 for a wrong
    command line, 130 after an interruption).
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        @functools.wraps(function)
        def run(*, as_json: bool, quiet: bool, debug: bool, **options: Any) -> None:
            output = Output(as_json=as_json, quiet=quiet)
            warnings.showwarning = lambda message, *_args, **_kw: output.note(
                f"Warning: {' '.join(str(message).split())}"
            )
            try:
                function(output, **options)
            except KeyboardInterrupt:
                _fail("Interrupted.", 130, debug)
            except typer.Exit:
                raise
            except GraphPipeError as error:
                _fail(f"Error: {error}", 1, debug)
            except BrokenPipeError:
                # Whoever read our output has seen enough, as in `graphpipe ... | head`.
                sys.stderr.close()
                raise typer.Exit(1) from None
            except Exception as error:
                _fail(
                    f"Error: {type(error).__name__}: {error}. GraphPipe did not expect this "
                    f"in '{name}'; --debug shows where it happened.",
                    1,
                    debug,
                )

        run.__signature__ = inspect.Signature([*keyword, *_COMMON])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*keyword, *_COMMON)}
        app.command(name)(run)
        return function

    return register


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(" ".join(message.split()), file=sys.stderr)
    raise typer.Exit(code)
