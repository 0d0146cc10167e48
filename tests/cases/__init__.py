"""The hard cases from public reports, and which test shows the right behaviour of each.

"Cuts" is ``test_models.py`` (random cuts, equal and unequal sizes, every count of stages and
micro-batches as a campaign); capture alone is ``tests/graph/test_cases.py``.

====  =================================================================================
A01   cuts (``a01_skip_long``, ``a01_skip_unet``); direct edge: ``test_runtime.py``
A02   cuts; five Adam steps, copies bit-equal: ``test_runtime.py``
A04   cuts; no backward, no message, no all-reduce: ``test_runtime.py``
A06   cuts; gradient messages from one place: ``tests/plan/test_edges.py``
A08   cuts (both models); merged outputs: ``test_behaviour.py``, ``tests/graph/test_cases.py``
A09   cuts; the unmarked tensor is named: ``test_behaviour.py``
A10   cuts; missing keyword on all ranks: ``test_behaviour.py``
A11   cuts; ``tests/graph/test_cases.py``
A13   cuts; one value refused: ``test_behaviour.py``; replicas: ``tests/runtime/test_pipeline.py``
A14   masks, recomputation, replicas, evaluation: ``test_behaviour.py``
A15   cuts; ``tests/graph/test_loss_terms.py``
A17   cuts; short batches, other lengths: ``test_behaviour.py``
A18   cuts; with and without images in one run: ``test_behaviour.py``
A20   cuts
A23   cuts (all three); against sequential plans: ``tests/planner/test_search.py``
A25   cuts; whole mini-batch exact: ``test_behaviour.py``, ``tests/runtime/test_coupled.py``
A27   opaque on both branches, refusal with module, line, remedy: ``test_behaviour.py``
B01   ``test_runtime.py`` (gloo, 4 processes, all builders)
B03   ``test_behaviour.py`` (10 = 3+3+3+1, lengths); accumulation: ``test_runtime.py``
B04   ``test_runtime.py``
B06   ``test_behaviour.py``, ``tests/runtime/test_training.py``
B08   ``test_runtime.py``; statically: ``tests/plan/test_checks.py``
B10   ``tests/runtime/test_failures.py``
B12   ``test_runtime.py``, ``tests/runtime/checkpoint``
B14   ``test_runtime.py``
C01   ``tests/planner/test_search.py``
C02   ``tests/planner/test_search.py``
C04   ``tests/planner/test_search.py``
C06   ``tests/planner/test_search.py``, ``tests/simulate/test_simulator.py``
C08   ``tests/planner/test_search.py``
C09   ``tests/cost/published/test_load.py``
D01   ``test_usability.py``
D02   ``test_usability.py``
====  =================================================================================
"""
