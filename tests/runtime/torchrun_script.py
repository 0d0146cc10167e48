"""What a user starts with torchrun: trains the diamond on two ranks and prints each loss."""

from __future__ import annotations

import torch.distributed as dist

from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, halves, sgd
from tests.runtime.manual import Part, manual_plan


def main() -> None:
    made, graph = example("diamond")
    parts = [Part("stem", 2, (0,)), Part("a", 2, (1,)), Part("b", 2, (0,)), Part("cat", 2, (1,))]
    plan = manual_plan(graph, parts, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=60)
    for step in range(3):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        print(f"rank {dist.get_rank()} step {step} loss {float(loss):.6f}", flush=True)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
