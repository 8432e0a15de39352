"""Virtual machines for a test: they come up in a moment, and always go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nodes import Keys, Lab, NodeOptions, why_not
from tests.support.processes import wait_until

_VANISH_S = 15.0


@pytest.fixture(scope="session")
def ssh_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Made once; a skip where there can be no nodes."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def make_lab(ssh_keys: Keys, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """``make_lab(count, node2=NodeOptions(...), default=...)``; at the end no node may have anything running."""
    labs: list[Lab] = []
    with contextlib.ExitStack() as stack:

        def make(count: int, **special: NodeOptions) -> Lab:
            lab = Lab(tmp_path / f"lab{len(labs)}", ssh_keys, count, **special)
            labs.append(stack.enter_context(lab))
            return lab

        yield make
        left: list[object] = []

        def is_tidy() -> bool:
            left[:] = [pids for lab in labs if (pids := lab.leftovers())]
            return not left

        with contextlib.suppress(TimeoutError):
            wait_until(is_tidy, _VANISH_S)
    if left:
        pytest.fail(f"left running on nodes: {left}")
