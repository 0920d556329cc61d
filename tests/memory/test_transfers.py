"""The order of transfers and what is told when they fail."""

from threading import Event
from time import sleep

import pytest

from zeepo.memory.transfers import Lane, TransferQueue


def test_of_several_parts_that_fail_the_first_is_told() -> None:
    """Whoever was quicker: which block is named must not depend on the threads."""
    queue = TransferQueue("test", num_threads=2)
    has_failed = Event()

    def first(_: int) -> None:
        has_failed.wait(10)
        raise OSError("the first")

    def second(_: int) -> None:
        has_failed.set()
        raise OSError("the second")

    with pytest.raises(OSError, match="the first"):
        queue.submit(Lane(), [first, second], exclusive=True).result(10)
    queue.close()


def test_after_a_failure_no_other_part_is_begun() -> None:
    queue = TransferQueue("test", num_threads=1)
    begun: list[int] = []

    def part(number: int) -> None:
        begun.append(number)
        raise OSError(f"part {number}")

    parts = [lambda _, number=number: part(number) for number in range(3)]
    with pytest.raises(OSError, match="part 0"):
        queue.submit(Lane(), parts, exclusive=True).result(10)
    queue.close()
    assert begun == [0]


def test_a_queue_that_is_never_idle_is_busy_until_now() -> None:
    queue = TransferQueue("test", num_threads=2)
    has_begun, may_end = Event(), Event()

    def part(_: int) -> None:
        has_begun.set()
        may_end.wait(10)

    assert queue.seconds_busy == 0.0
    future = queue.submit(Lane(), [part], exclusive=True)
    assert has_begun.wait(10)
    before = queue.seconds_busy
    sleep(0.02)
    assert queue.seconds_busy >= before + 0.02
    may_end.set()
    future.result(10)
    queue.close()
    after = queue.seconds_busy
    sleep(0.02)
    assert queue.seconds_busy == after > before
