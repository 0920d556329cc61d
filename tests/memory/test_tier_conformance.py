"""What every tier promises, run against every tier."""

import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from zeepo.errors import InternalError, SessionError
from zeepo.memory import native_blocks
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.ledger import Ledger
from zeepo.memory.mapping import Mapping
from zeepo.memory.pool import BufferPool
from zeepo.memory.ram_tier import RamTier
from zeepo.memory.tier import Tier

BLOCK = 64 << 10  # Small blocks, so that small extents have many.
PART = 4 << 20
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 4097]
SIZES += [PART + BLOCK + 1, 2 * PART + 3]
TIERS = ["ram", "ram-threads", "direct", "buffered", "memory-disk", "striped", "one-thread"]
PYTHON_TIERS = ["direct", "buffered", "striped"]


def make_tier(kind: str, folder: Path) -> Tier:
    if kind == "ram":
        return RamTier(BufferPool(Ledger("ram", None)))
    if kind == "ram-threads":
        return RamTier(Ledger("ram", None), num_threads=3)
    if kind == "direct":
        return DiskTier([folder], block_bytes=BLOCK, direct=True)
    if kind == "buffered":
        return DiskTier([folder], block_bytes=BLOCK, direct=False)
    if kind == "one-thread":
        return DiskTier([folder], block_bytes=BLOCK, num_threads=1)
    if kind == "memory-disk":
        return DiskTier([folder], block_bytes=BLOCK)
    parts = [folder / name for name in "abc"]
    for part in parts:
        part.mkdir()
    return DiskTier(parts, block_bytes=BLOCK, weights=[5.0, 1.0, 2.5])


@pytest.fixture(params=[*TIERS, *(f"python-{kind}" for kind in PYTHON_TIERS)])
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tier]:
    folder = tmp_path
    if request.param.startswith("python-"):
        monkeypatch.setattr(native_blocks, "library", None)
    if request.param == "memory-disk":
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm: no tmpfs to test buffered I/O on")
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    tier = make_tier(request.param.removeprefix("python-"), folder)
    yield tier
    tier.close()
    if request.param == "memory-disk":
        shutil.rmtree(folder)


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def aligned(content: bytes) -> memoryview:
    memory = Mapping(len(content)).memory[: len(content)]
    memory[:] = content
    return memory


def read_back(tier: Tier, extent: object, nbytes: int) -> bytes:
    target = bytearray(nbytes)
    tier.read(extent, memoryview(target)).result()  # type: ignore[arg-type]
    return bytes(target)


class TestTier:
    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("shift", [0, 3])
    def test_round_trip(self, tier: Tier, nbytes: int, shift: int) -> None:
        """`shift` moves source and target off their alignment."""
        content = random_bytes(nbytes)
        extent = tier.allocate("chunk", nbytes)
        assert extent.num_writes == 0
        source = aligned(bytes(shift) + content)[shift:]
        tier.write(extent, [(0, source)]).result()
        assert extent.num_writes == 1
        target = aligned(b"\xaa" * (shift + nbytes + 9000))
        tier.read(extent, target[shift : shift + nbytes]).result()
        assert bytes(target[shift : shift + nbytes]) == content
        target[:] = b"\xaa" * len(target)
        tier.read(extent, target[shift:]).result()
        assert bytes(target[shift : shift + nbytes]) == content
        # Nothing outside the extent's bytes is touched.
        assert bytes(target[:shift]) == b"\xaa" * shift
        assert bytes(target[shift + nbytes :]) == b"\xaa" * 9000
        assert (tier.bytes_written, tier.bytes_read) == (nbytes, 2 * nbytes)

    def test_gaps_are_zeros(self, tier: Tier) -> None:
        rng = random.Random(7)
        extent = tier.allocate("chunk", 9 * BLOCK + 100)
        tier.write(extent, [(0, memoryview(random_bytes(extent.nbytes)))]).result()
        for trial in range(10):
            cuts = sorted(rng.sample(range(extent.nbytes), 2 * rng.randint(0, 40)))
            if trial % 2:
                cuts = sorted({cut // 4096 * 4096 for cut in cuts})
                cuts = cuts[: len(cuts) // 2 * 2]
            expected = bytearray(extent.nbytes)
            pieces = []
            for low, high in zip(cuts[::2], cuts[1::2], strict=True):
                content = random_bytes(high - low, low)
                expected[low:high] = content
                pieces.append((low, aligned(content)))
            tier.write(extent, pieces).result()
            assert read_back(tier, extent, extent.nbytes) == expected

    def test_pieces_of_other_formats_are_bytes(self, tier: Tier) -> None:
        values = np.arange(5000, dtype=np.float32).reshape(50, 100)
        extent = tier.allocate("chunk", 20_000)
        tier.write(extent, [(0, memoryview(values))]).result()
        back = np.empty_like(values)
        tier.read(extent, memoryview(back)).result()
        assert np.array_equal(values, back)

    def test_a_read_sees_the_writes_submitted_before_it(self, tier: Tier) -> None:
        """Many requests outstanding, none awaited: order per extent decides what is read."""
        nbytes = 3 * BLOCK + 5
        extents = [tier.allocate(f"chunk {i}", nbytes) for i in range(8)]
        reads = []
        for version in range(12):
            for i, extent in enumerate(extents):
                content = bytes([version * 8 + i]) * nbytes
                tier.write(extent, [(0, memoryview(content))])
                for _ in range(2):
                    target = bytearray(nbytes)
                    reads.append((tier.read(extent, memoryview(target)), target, content))
        for future, target, content in reads:
            future.result()
            assert target == content
        assert all(extent.num_writes == 12 for extent in extents)

    def test_one_buffer_used_by_a_write_after_a_read(self, tier: Tier) -> None:
        """A write must wait for earlier reads of the extent, even large ones."""
        nbytes = 2 * PART + BLOCK
        old, new = random_bytes(nbytes, 1), random_bytes(nbytes, 2)
        extent = tier.allocate("chunk", nbytes)
        tier.write(extent, [(0, memoryview(old))])
        for _ in range(5):
            target = aligned(bytes(nbytes))
            reading = tier.read(extent, target)
            tier.write(extent, [(0, memoryview(new))])
            reading.result()
            assert bytes(target) == old
            old, new = new, old

    def test_freed_room_is_reused_and_others_keep_theirs(self, tier: Tier) -> None:
        rng = random.Random(3)
        live: dict[int, tuple[object, bytes]] = {}
        for step in range(150):
            if live and rng.random() < 0.45:
                extent, content = live.pop(rng.choice(list(live)))
                assert read_back(tier, extent, len(content)) == content
                tier.free(extent)  # type: ignore[arg-type]
            else:
                content = random_bytes(rng.randint(0, 3 * BLOCK), step)
                extent = tier.allocate(f"chunk {step}", len(content))
                tier.write(extent, [(0, memoryview(content))])
                live[step] = (extent, content)
        for extent, content in live.values():
            assert read_back(tier, extent, len(content)) == content
            tier.free(extent)  # type: ignore[arg-type]
        assert tier.used_bytes == 0
        assert tier.peak_bytes > 0

    def test_free_waits_for_what_was_submitted(self, tier: Tier) -> None:
        nbytes = PART
        content = random_bytes(nbytes)
        for i in range(5):
            extent = tier.allocate(f"chunk {i}", nbytes)
            target = bytearray(nbytes)
            tier.write(extent, [(0, memoryview(content))])
            reading = tier.read(extent, memoryview(target))
            tier.free(extent)
            other = tier.allocate("other", nbytes)
            overwriting = tier.write(other, [(0, memoryview(bytes(nbytes)))])
            reading.result()
            assert target == content
            overwriting.result()
            tier.free(other)

    def test_used_and_peak_bytes(self, tier: Tier) -> None:
        extent = tier.allocate("a", 5 * BLOCK)
        assert tier.used_bytes == 5 * BLOCK
        tier.free(tier.allocate("b", 4096))
        assert (tier.used_bytes, tier.peak_bytes) == (5 * BLOCK, 5 * BLOCK + 4096)
        tier.free(extent)
        assert tier.used_bytes == 0

    def test_many_threads(self, tier: Tier) -> None:
        failures: list[object] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for i in range(25):
                content = random_bytes(rng.randint(1, 3 * BLOCK), seed * 1000 + i)
                extent = tier.allocate(f"{seed}/{i}", len(content))
                tier.write(extent, [(0, memoryview(content))])
                if read_back(tier, extent, len(content)) != content:
                    failures.append((seed, i))
                tier.free(extent)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert tier.used_bytes == 0

    def test_callbacks_may_submit(self, tier: Tier) -> None:
        content = random_bytes(BLOCK + 1)
        extent = tier.allocate("chunk", len(content))
        target = bytearray(len(content))
        done = threading.Event()

        def then_read(_: object) -> None:
            tier.read(extent, memoryview(target)).add_done_callback(lambda _: done.set())

        tier.write(extent, [(0, memoryview(content))]).add_done_callback(then_read)
        assert done.wait(60)
        assert target == content

    def test_an_extent_never_written_cannot_be_read(self, tier: Tier) -> None:
        extent = tier.allocate("chunk 7", 10)
        with pytest.raises(InternalError, match="'chunk 7' was read before"):
            tier.read(extent, memoryview(bytearray(10)))

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda tier, extent: tier.read(extent, memoryview(bytearray(99))),
            lambda tier, extent: tier.read(extent, memoryview(bytes(100))),
            lambda tier, extent: tier.read(extent, memoryview(bytearray(200))[::2]),
            lambda tier, extent: tier.write(extent, [(1, memoryview(bytes(100)))]),
            lambda tier, extent: tier.write(extent, [(-1, memoryview(bytes(10)))]),
            lambda tier, extent: tier.write(extent, [(0, memoryview(bytes(2)))] * 2),
            lambda tier, extent: tier.write(
                extent, [(50, memoryview(bytes(2))), (0, memoryview(bytes(2)))]
            ),
        ],
    )
    def test_misuse_is_refused_at_once(
        self, tier: Tier, misuse: Callable[[Tier, object], object]
    ) -> None:
        extent = tier.allocate("chunk", 100)
        tier.write(extent, [(0, memoryview(bytes(100)))]).result()
        with pytest.raises(InternalError, match="'chunk'"):
            misuse(tier, extent)
        assert extent.num_writes == 1

    def test_use_after_free_is_refused(self, tier: Tier) -> None:
        extent = tier.allocate("chunk", 100)
        tier.write(extent, [(0, memoryview(bytes(100)))])
        tier.free(extent)
        for misuse in (
            lambda: tier.read(extent, memoryview(bytearray(100))),
            lambda: tier.write(extent, []),
            lambda: tier.free(extent),
        ):
            with pytest.raises(InternalError, match="after it was freed"):
                misuse()

    def test_close_completes_every_future(self, tier: Tier) -> None:
        content = memoryview(random_bytes(PART))
        futures = []
        for i in range(20):
            extent = tier.allocate(f"chunk {i}", PART)
            futures.append(tier.write(extent, [(0, content)]))
            futures.append(tier.read(extent, memoryview(bytearray(PART))))
        tier.close()
        tier.close()
        assert not wait(futures, timeout=0).not_done
        errors = [future.exception() for future in futures]
        assert all(error is None or isinstance(error, SessionError) for error in errors)
        with pytest.raises(SessionError, match="closed"):
            tier.write(extent, [(0, content)])
        assert not [t for t in threading.enumerate() if t.name.startswith(f"zeepo-{tier.name}")]
