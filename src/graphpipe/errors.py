"""The exceptions that users of GraphPipe meet.

Every message says four things: what happened, where, what was expected and what was
found, and what to do about it. ``str(error)`` is one paragraph; the command line prints
it as it is.
"""

from __future__ import annotations


class GraphPipeError(Exception):
    """Base class of every error that GraphPipe raises on purpose.

    Args:
        what: What went wrong, one sentence without a final full stop.
        where: The op, stage, field, file or rank concerned.
        expected: What would have been right.
        got: What was found instead.
        fix: What the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(self._paragraph())

    def _paragraph(self) -> str:
        text = self.what
        if self.where is not None:
            text += f" (at {self.where})"
        text += "."
        if self.expected is not None:
            text += f" Expected {self.expected}"
            text += f", got {self.got}." if self.got is not None else "."
        elif self.got is not None:
            text += f" Got {self.got}."
        if self.fix is not None:
            text += f" {self.fix.rstrip('.')}."
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.expected, self.got, self.fix))


def _rebuild(
    kind: type[GraphPipeError],
    what: str,
    where: str | None,
    expected: object,
    got: object,
    fix: str | None,
) -> GraphPipeError:
    return kind(what, where=where, expected=expected, got=got, fix=fix)


class CaptureError(GraphPipeError):
    """The model cannot be captured as a graph, or not without changing its meaning."""


class GraphError(GraphPipeError):
    """A model graph is malformed."""


class FileFormatError(GraphPipeError):
    """A file is truncated, malformed, of an unknown version or of another kind."""


class CostError(GraphPipeError):
    """Costs are missing, malformed or belong to another graph or device."""


class ClusterError(GraphPipeError):
    """A cluster or device description is malformed or names something unknown."""


class PlanError(GraphPipeError):
    """A plan breaks a rule: an op missing or doubled, a cycle, memory exceeded."""


class InfeasibleError(PlanError):
    """No plan exists for this input; the message names the nearest change that helps."""


class ScheduleError(PlanError):
    """A schedule breaks a dependency, an in-flight bound, or would deadlock."""


class InputError(GraphPipeError):
    """A step was given inputs that do not match the signature of the plan."""


class RuntimeSetupError(GraphPipeError):
    """World size, back-end, model or plan do not fit together; raised before training."""


class StageFailedError(GraphPipeError):
    """A task failed; names rank, stage, task and micro-batch of the first failure."""


class CheckpointError(GraphPipeError):
    """A checkpoint is incomplete, damaged or of another model."""
