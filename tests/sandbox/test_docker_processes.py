"""Which processes of a box belong to one exec, as a decision over plain facts."""

from __future__ import annotations

from nemo_gym.sandbox.providers.docker.execution import Process, select

SHIM = 10
"""The parent of everything the engine starts; not in the box."""


def chosen(*processes: Process, main_pid: int | None = 100, others: frozenset[str] = frozenset()) -> set[int]:
    return select(processes, exec_id="mine", main_pid=main_pid, began_ticks=1000, others=others)


def process(pid: int, parent: int, *, mark: str | None = None, session: int = 0, started: int = 2000) -> Process:
    return Process(pid=pid, parent=parent, session=session or pid, started_ticks=started, mark=mark)


def test_select_takes_descendants_whatever_their_environment_says() -> None:
    tree = [process(100, SHIM, mark="mine"), process(101, 100), process(102, 101, session=102)]
    assert chosen(*tree) == {100, 101, 102}


def test_select_takes_a_marked_daemon_that_was_reparented() -> None:
    assert chosen(process(200, 1, mark="mine"), main_pid=None) == {200}


def test_select_takes_an_unmarked_daemon_when_no_other_exec_ran() -> None:
    assert chosen(process(100, SHIM, mark="mine"), process(300, 1)) == {100, 300}


def test_select_leaves_an_unmarked_daemon_when_another_exec_ran() -> None:
    assert chosen(process(100, SHIM, mark="mine"), process(300, 1), others=frozenset({"other"})) == {100}


def test_select_takes_an_unmarked_orphan_of_an_own_session_when_another_exec_ran() -> None:
    tree = [process(100, SHIM, mark="mine", session=100), process(300, 1, session=100)]
    assert chosen(*tree, others=frozenset({"other"})) == {100, 300}


def test_select_leaves_other_execs_and_what_is_older() -> None:
    theirs = [process(400, SHIM, mark="other"), process(401, 400, mark="other")]
    older = [process(7, 1, started=5), process(8, 7, started=3000)]
    assert chosen(process(100, SHIM, mark="mine"), *theirs, *older) == {100}


def test_select_survives_a_parent_cycle_made_by_reused_pids() -> None:
    assert chosen(process(100, SHIM, mark="mine"), process(500, 501), process(501, 500)) == {100, 500, 501}
