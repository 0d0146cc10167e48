"""What is watched while a model is traced."""

from __future__ import annotations

import builtins
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from graphpipe.errors import CaptureError
from graphpipe.graph import watch
from graphpipe.graph.watch import ModuleStack, is_user_file, refuse_autograd_functions, user_frame


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class _Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Double.apply(x)
        return result


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Identity(), _Inner())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result


def test_a_custom_function_is_refused_by_name_and_module() -> None:
    whole, x = _Whole(), torch.ones(2)
    with (
        ModuleStack(whole) as stack,
        refuse_autograd_functions(stack),
        pytest.raises(CaptureError, match=r"_Double.*module '1'.*opaque=\['1'\]"),
    ):
        whole(x)
    assert stack.where == "1"
    assert torch.equal(whole(x), 2 * x)


def test_checkpointing_is_a_plain_call_of_what_it_wraps() -> None:
    x = torch.ones(2, requires_grad=True)
    with ModuleStack(nn.Identity()) as stack, refuse_autograd_functions(stack):
        y = CheckpointFunction.apply(torch.tanh, True, x)
    assert type(y.grad_fn).__name__ == "TanhBackward0"


def test_other_threads_are_left_alone() -> None:
    whole, found = _Whole(), []
    with ModuleStack(whole) as stack, refuse_autograd_functions(stack):
        thread = threading.Thread(target=lambda: found.append(whole(torch.ones(2))))
        thread.start()
        thread.join()
        assert stack.where is None
    assert found[0].tolist() == [2, 2]


def test_len_is_itself_again_afterwards() -> None:
    before = builtins.len, torch.Tensor.__len__
    with ModuleStack(nn.Identity()) as stack, watch.symbolic_len(stack):
        assert builtins.len is not before[0]
        assert (len(torch.ones(3, 2)), len([1])) == (3, 1)
    assert (builtins.len, torch.Tensor.__len__) == before


def test_the_innermost_frame_of_the_user_is_found() -> None:
    assert is_user_file(__file__)
    assert not any(map(is_user_file, (torch.__file__, watch.__file__, "<string>")))
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))
    assert user_frame(caught.value.__traceback__) == (__file__, caught.tb.tb_lineno)
