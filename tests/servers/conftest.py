from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_gym.contract.credentials import Role
from tests.servers.plugins import CounterEnvironment, FrankEnvironment, PhraseEnvironment
from tests.servers.sessions import no_session_left
from tests.servers.stack import Stack, running_stack

__all__ = ["no_session_left"]


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


@pytest.fixture
def phrase(stack: Stack) -> Stack:
    """A stack with the environment ``phrase``."""
    stack.add("phrase", PhraseEnvironment, Role.ENVIRONMENT)
    return stack


@pytest.fixture
def counter(stack: Stack) -> Stack:
    """A stack with the environment ``counter``."""
    stack.add("counter", CounterEnvironment, Role.ENVIRONMENT)
    return stack


@pytest.fixture
def frank(stack: Stack) -> Stack:
    """A stack with the environment ``frank``."""
    stack.add("frank", FrankEnvironment, Role.ENVIRONMENT)
    return stack
