"""Small graphs made by hand, for the tests of costs."""

from __future__ import annotations

from graphpipe.graph.model_graph import (
    GraphInput,
    ModelGraph,
    Op,
    Parameter,
    Storage,
    TensorSpec,
    Work,
)


def spec(*shape: int | str, dtype: str = "float32", grad: bool = True) -> TensorSpec:
    """A tensor."""
    return TensorSpec(shape=shape, dtype=dtype, requires_grad=grad)


def mlp(width: int = 8, *, name: str = "mlp") -> ModelGraph:
    """x [b, w] -> linear -> relu -> layer_norm -> linear -> contrastive loss with b x b logits.

    A frozen linear runs beside the first one and is added to it.
    """
    w = width
    weight, row = 4 * w * w, 4 * w
    linear = Work(flops=f"{2 * w * w}*b", bytes=f"{weight} + {2 * row}*b", kernels=1)
    twice = Work(flops=f"{4 * w * w}*b", bytes=f"{2 * weight} + {4 * row}*b", kernels=2)
    pointwise = Work(bytes=f"{2 * row}*b", kernels=1)
    ops = (
        Op(
            name="frozen",
            target="aten.linear.default",
            key="frozen",
            inputs=("x",),
            parameters=("frozen.weight",),
            output=spec("b", w, grad=False),
            forward=linear,
            backward=twice,
            saves=(Storage(id="x", bytes=f"{row}*b"),),
        ),
        Op(
            name="first",
            target="aten.linear.default",
            key="first",
            inputs=("x",),
            parameters=("first.weight",),
            output=spec("b", w),
            requires_grad=True,
            forward=linear,
            backward=twice,
            saves=(Storage(id="x", bytes=f"{row}*b"),),
        ),
        Op(
            name="add",
            target="aten.add.Tensor",
            key="add",
            inputs=("first", "frozen"),
            output=spec("b", w),
            requires_grad=True,
            forward=pointwise,
            backward=Work(),
        ),
        Op(
            name="view",
            target="aten.view.default",
            key="view",
            inputs=("add",),
            output=spec("b", w),
            requires_grad=True,
        ),
        Op(
            name="norm",
            target="aten.layer_norm.default",
            key="norm",
            inputs=("view",),
            output=spec("b", w),
            requires_grad=True,
            forward=pointwise,
            backward=pointwise,
            saves=(Storage(id="add", bytes=f"{row}*b"),),
        ),
        Op(
            name="second",
            target="aten.linear.default",
            key="second",
            inputs=("norm",),
            parameters=("second.weight",),
            output=spec("b", w),
            requires_grad=True,
            forward=linear,
            backward=twice,
            saves=(Storage(id="norm", bytes=f"{row}*b"),),
        ),
        Op(
            name="logits",
            target="aten.matmul.default",
            key="logits",
            inputs=("second", "x"),
            output=spec("b", "b"),
            requires_grad=True,
            coupled=True,
            crossable=False,
            forward=Work(flops=f"{2 * w}*b*b", bytes="4*b*b", kernels=1),
            backward=Work(flops=f"{2 * w}*b*b", bytes="4*b*b", kernels=1),
            saves=(Storage(id="x", bytes=f"{row}*b"),),
        ),
        Op(
            name="loss",
            target="aten.cross_entropy_loss.default",
            key="loss",
            inputs=("logits",),
            output=spec(),
            requires_grad=True,
            coupled=True,
            forward=Work(bytes="8*b*b", kernels=2),
            backward=Work(bytes="8*b*b", kernels=2),
            saves=(Storage(id="loss.softmax", bytes="4*b*b"),),
        ),
    )
    parameters = tuple(
        Parameter(name=f"{item}.weight", shape=(w, w), dtype="float32", trainable=item != "frozen")
        for item in ("frozen", "first", "second")
    )
    x = GraphInput(name="x", path="args[0]", spec=spec("b", w, grad=False))
    return ModelGraph(name=name, inputs=(x,), parameters=parameters, ops=ops)
