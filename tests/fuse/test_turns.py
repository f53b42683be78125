"""Whose turn it is to read the kernel's next request, and that nobody is kept from theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trainmount_fuse.turns import Library, Turn


def run_with(turn: Turn, main: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(main, instruments=[turn])


def test_who_comes_back_without_waiting_keeps_the_turn() -> None:
    turn = Turn()
    order: list[str] = []

    async def reader(name: str, steps: int) -> None:
        for _ in range(steps):
            async with turn:
                await trio.lowlevel.checkpoint()
            order.append(name)

    async def main() -> None:
        async with trio.open_nursery() as nursery, turn:
            nursery.start_soon(reader, "first", 3)
            await wait_all_tasks_blocked()
            nursery.start_soon(reader, "second", 2)
            await wait_all_tasks_blocked()

    run_with(turn, main)
    assert order == ["first", "first", "first", "second", "second"]


def test_who_waits_for_something_else_hands_the_turn_on() -> None:
    turn = Turn()
    order: list[str] = []
    may_go_on = trio.Event()

    async def slow() -> None:
        async with turn:
            await trio.lowlevel.checkpoint()
        order.append("slow has read")
        await may_go_on.wait()
        order.append("slow has answered")

    async def quick() -> None:
        async with turn:
            order.append("quick has read")
            await trio.lowlevel.checkpoint()
        may_go_on.set()

    async def main() -> None:
        async with trio.open_nursery() as nursery, turn:
            nursery.start_soon(slow)
            await wait_all_tasks_blocked()
            nursery.start_soon(quick)
            await wait_all_tasks_blocked()

    run_with(turn, main)
    assert order == ["slow has read", "quick has read", "slow has answered"]


def test_a_task_that_was_told_to_stop_gets_no_turn_and_keeps_none() -> None:
    turn = Turn()
    order: list[str] = []

    async def reader(name: str, scope: trio.CancelScope) -> None:
        with scope:
            async with turn:
                order.append(name)
                await trio.sleep_forever()

    async def main() -> None:
        scopes = {name: trio.CancelScope() for name in "abc"}
        async with trio.open_nursery() as nursery:
            for name, scope in scopes.items():
                nursery.start_soon(reader, name, scope)
                await wait_all_tasks_blocked()
            # One that waits for the turn, then one that has it.
            scopes["b"].cancel()
            scopes["a"].cancel()
            await wait_all_tasks_blocked()
            scopes["c"].cancel()

    run_with(turn, main)
    assert order == ["a", "c"]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


async def _num_steps_of_others(count: int, wait: Callable[[], Awaitable[None]]) -> int:
    """How often another task had its turn while `wait` was called so many times."""
    steps = 0

    async def step() -> None:
        nonlocal steps
        while True:
            await trio.lowlevel.checkpoint()
            steps += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(step)
        await trio.lowlevel.checkpoint()
        before = steps
        for _ in range(count):
            await wait()
        nursery.cancel_scope.cancel()
    return steps - before


def test_a_request_that_is_there_is_read_at_once_and_many_let_others_have_a_turn(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    lowlevel = Library(Turn()).lowlevel
    far.send(b"request")
    steps = trio.run(_num_steps_of_others, 10, lambda: lowlevel.wait_readable(near.fileno()))
    assert steps == 0
    steps = trio.run(_num_steps_of_others, 200, lambda: lowlevel.wait_readable(near.fileno()))
    assert 5 <= steps <= 60


def test_who_waits_for_a_request_is_woken_by_it_and_by_the_end_of_the_mount(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    library = Library(Turn())
    heard: list[str] = []

    async def read() -> None:
        await library.lowlevel.wait_readable(near.fileno())
        heard.append(near.recv(7).decode())
        try:
            await library.lowlevel.wait_readable(near.fileno())
        except library.ClosedResourceError:
            heard.append("closed")

    async def main() -> None:
        async with library.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            far.send(b"request")
            await wait_all_tasks_blocked()
            assert heard == ["request"]
            library.lowlevel.notify_closing(near.fileno())

    trio.run(main)
    assert heard == ["request", "closed"]


class _Session:
    """Reads requests from a socket as pyfuse3's tasks do, and takes until `may_go_on` for each."""

    def __init__(self, fd: int) -> None:
        self.turn = Turn()
        self.library = Library(self.turn)
        self.may_go_on = trio.Event()
        self.answered: list[bytes] = []
        self._fd = fd

    async def serve(self, num_tasks: int) -> None:
        trio.lowlevel.add_instrument(self.turn)
        async with self.library.open_nursery() as nursery:
            for _ in range(num_tasks):
                nursery.start_soon(self._loop, name="reader")

    async def _loop(self) -> None:
        while True:
            try:
                async with self.turn:
                    await self.library.lowlevel.wait_readable(self._fd)
            except self.library.ClosedResourceError:
                return
            request = os.read(self._fd, 1)
            if request == b"!":
                raise BlockingIOError
            await self.may_go_on.wait()
            self.answered.append(request)


def test_a_session_that_is_told_to_end_answers_what_it_has_read_and_reads_no_more(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair

    async def main() -> list[bytes]:
        session, scope = _Session(near.fileno()), trio.CancelScope()

        async def serve() -> None:
            with scope:
                await session.serve(4)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            far.send(b"ab")
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            far.send(b"c")
            assert session.answered == []
            session.may_go_on.set()
        return session.answered

    assert sorted(trio.run(main)) == [b"a", b"b"]
    assert near.recv(9) == b"c"


def test_an_error_of_one_task_lets_the_others_answer_and_another_session_may_begin(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair

    async def main() -> list[bytes]:
        session = _Session(near.fileno())

        async def serve_twice() -> None:
            with pytest.raises(BaseExceptionGroup):
                await session.serve(3)
            assert session.answered == [b"a"]
            trio.lowlevel.remove_instrument(session.turn)
            await session.serve(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_twice)
            far.send(b"a!")
            await wait_all_tasks_blocked()
            session.may_go_on.set()
            await wait_all_tasks_blocked()
            far.send(b"b")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return session.answered

    assert trio.run(main) == [b"a", b"b"]


def test_looking_out_in_vain_ends_and_begins_again_where_requests_come_as_soon(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    lowlevel = Library(Turn()).lowlevel
    monkeypatch.setattr(lowlevel, "_is_shared", False)
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 50_000
        return now_ns

    monkeypatch.setattr("trainmount_fuse.turns.time.perf_counter_ns", clock)

    async def wait_for_one(pause_ns: int) -> int:
        """Looks at the clock until one that comes after that time is there."""
        nonlocal now_ns
        before = now_ns
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lowlevel.wait_readable, near.fileno())
            await wait_all_tasks_blocked()
            looked_ns = now_ns - before
            now_ns += pause_ns
            far.send(b"r")
        near.recv(1)
        return looked_ns // 50_000

    async def main() -> tuple[list[int], list[int]]:
        late = [await wait_for_one(10_000_000) for _ in range(10)]
        soon = [await wait_for_one(0) for _ in range(3)]
        return late, soon

    late, soon = trio.run(main)
    # The clock is looked at once before, and then until 0.1 ms are over.
    assert late == [4] * 8 + [1, 1]
    assert soon == [1, 4, 4]
