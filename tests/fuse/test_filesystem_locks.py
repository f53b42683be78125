"""The lock of the whole tree: many share it, one has it alone."""

from __future__ import annotations

import trio
import trio.testing

from trainmount_fuse.workers import TreeLock


async def test_sharers_run_together_and_a_mover_alone_and_next() -> None:
    lock, order = TreeLock(), []

    async def share(name: str, leave: trio.Event) -> None:
        async with lock.shared():
            order.append(f"{name} in")
            await leave.wait()
            order.append(f"{name} out")

    async def move() -> None:
        async with lock.exclusive():
            order.append("mover in")
            await trio.testing.wait_all_tasks_blocked()
            order.append("mover out")

    leave, at_once = trio.Event(), trio.Event()
    at_once.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(share, "first", leave)
        nursery.start_soon(share, "second", leave)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(move)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(share, "late", at_once)
        await trio.testing.wait_all_tasks_blocked()
        leave.set()
    assert sorted(order[:2]) == ["first in", "second in"]
    assert sorted(order[2:4]) == ["first out", "second out"]
    assert order[4:] == ["mover in", "mover out", "late in", "late out"]


async def test_a_mover_that_gives_up_keeps_nobody_waiting() -> None:
    lock = TreeLock()
    async with lock.shared():
        with trio.move_on_after(0.01) as scope:
            async with lock.exclusive():
                raise AssertionError("not alone")
        assert scope.cancelled_caught
    with trio.fail_after(5):
        async with lock.shared():
            pass
