"""What loader workers are asked for and what they hand over comes whole and in order, small
messages without a thread in between.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.queues import PromptQueue

DEADLINE_SECONDS = 30.0


def feeders() -> int:
    return sum(thread.name == "QueueFeederThread" for thread in threading.enumerate())


@pytest.fixture
def messages() -> Iterator[PromptQueue]:
    made = PromptQueue(ctx=multiprocessing.get_context("fork"))
    yield made
    made.close()
    made.join_thread()


def drain(messages: PromptQueue, count: int) -> list[Any]:
    return [messages.get(timeout=DEADLINE_SECONDS) for _ in range(count)]


def test_a_small_message_is_there_when_put_returns_and_starts_no_thread(
    messages: PromptQueue,
) -> None:
    before = feeders()
    messages.put((0, [1, 2, 3]))
    assert messages.get(timeout=0) == (0, [1, 2, 3])
    assert feeders() == before
    with pytest.raises(queue.Empty):
        messages.get(timeout=0)


def test_small_and_large_messages_keep_their_order(messages: PromptQueue) -> None:
    sent = [bytes(size) + b"%d" % size for size in (1, 200_000, 2, 3, 70_000, 4, 4_000, 5_000, 5)]
    for message in sent:
        messages.put(message)
    assert drain(messages, len(sent)) == sent
    # What was large has gone, so the next one needs no thread again.
    messages.put(b"small")
    assert messages.get(timeout=DEADLINE_SECONDS) == b"small"


def test_more_than_the_pipe_has_room_for_is_put_without_waiting(messages: PromptQueue) -> None:
    sent = [(number, "x" * 3_000) for number in range(100)]
    for message in sent:
        messages.put(message)
    assert drain(messages, len(sent)) == sent


def test_several_processes_put_into_one_queue(messages: PromptQueue) -> None:
    def put(process: int) -> None:
        for number in range(200):
            messages.put((process, number, bytes(number * 50)))
        messages.close()
        messages.join_thread()

    context = multiprocessing.get_context("fork")
    putting = [context.Process(target=put, args=(number,)) for number in range(3)]
    for each in putting:
        each.start()
    got = drain(messages, 600)
    for each in putting:
        each.join(DEADLINE_SECONDS)
        assert each.exitcode == 0
    for process in range(3):
        assert [message[1:] for message in got if message[0] == process] == [
            (number, bytes(number * 50)) for number in range(200)
        ]


def test_after_close_nothing_is_put(messages: PromptQueue) -> None:
    messages.close()
    with pytest.raises(ValueError, match="closed"):
        messages.put("small")


def test_what_cannot_be_pickled_is_an_error_and_the_next_message_comes(
    messages: PromptQueue,
) -> None:
    with pytest.raises(AttributeError, match="local object"):
        messages.put(lambda: None)
    messages.put("next")
    assert messages.get(timeout=DEADLINE_SECONDS) == "next"


def sizes(paths: list[str]) -> torch.Tensor:
    return torch.tensor([Path(path).stat().st_size for path in paths])


@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_a_loader_keeps_the_context_that_it_was_given(tmp_path: Path, method: str | None) -> None:
    for number in range(1, 6):
        (tmp_path / f"file-{number}").write_bytes(bytes(number))
    loader = DataLoader(
        UCVolumeDataset(str(tmp_path)),
        batch_size=2,
        num_workers=1,
        collate_fn=sizes,
        multiprocessing_context=method,
    )
    given = loader.multiprocessing_context
    before = feeders()
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4], [5]]
    assert feeders() == before
    assert loader.multiprocessing_context is given
