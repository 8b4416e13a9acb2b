"""Groups of processes that live for the whole session."""

from __future__ import annotations

import pytest
from gloo_group import Group

TIMEOUT = 30  # seconds one exchange may take


@pytest.fixture(scope="session")
def gloo():
    """`gloo(size)` is a group of that many processes, started once."""
    groups: dict[int, Group] = {}

    def group(size: int) -> Group:
        return groups.setdefault(size, Group(size, TIMEOUT))

    yield group
    for one in groups.values():
        one.close()


@pytest.fixture
def brittle_group():
    """`brittle_group(size, timeout)` is a group of this test alone, for faults a group does not survive."""
    groups: list[Group] = []

    def group(size: int, timeout: float) -> Group:
        groups.append(Group(size, timeout))
        return groups[-1]

    yield group
    for one in groups:
        one.close()
