"""The order of transfers and what is told when they fail."""

from threading import Event

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
