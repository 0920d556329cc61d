"""A native library that is not of these sources is refused by name."""

import ctypes
import shutil
from pathlib import Path

import pytest

from zeepo.errors import InternalError
from zeepo.memory import native_blocks
from zeepo.native import load


class Other(ctypes.Structure):
    _fields_ = (("one", ctypes.c_int8),)


def nothing(library: ctypes.CDLL) -> None:
    pass


def newer(library: ctypes.CDLL) -> None:
    library.zeepo_function_of_a_later_version.restype = ctypes.c_int64


def test_what_was_not_built_is_none(tmp_path: Path) -> None:
    assert load(str(tmp_path / "m.py"), "_block_io", Other, "zeepo_block_bytes", nothing) is None


@pytest.mark.skipif(native_blocks.library is None, reason="nothing was compiled")
@pytest.mark.parametrize(
    ("structure", "size_function", "declare"),
    [
        (Other, "zeepo_block_bytes", nothing),
        (native_blocks.NativeBlock, "zeepo_block_bytes", newer),
        (native_blocks.NativeBlock, "zeepo_size_of_a_later_version", nothing),
    ],
    ids=["another structure", "a function is missing", "its size is not told"],
)
def test_other_sources_are_refused(
    tmp_path: Path, structure: type[ctypes.Structure], size_function: str, declare: object
) -> None:
    assert native_blocks.library is not None
    built = Path(native_blocks.library._name)
    shutil.copy(built, tmp_path / built.name)
    with pytest.raises(InternalError, match=f"{built.name} was built from other sources"):
        load(str(tmp_path / "m.py"), "_block_io", structure, size_function, declare)  # type: ignore[arg-type]
