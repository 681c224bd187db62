"""torch.compile in tests: how much was compiled, and compiling without the C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch


def graphs() -> int:
    """How many graphs were compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def only_traced() -> Iterator[None]:
    """Trace and differentiate as always, but leave out the C++ compiler, which takes ten seconds a layer.

    What was compiled before is forgotten: it would not be compiled again, nor counted.
    """
    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield
