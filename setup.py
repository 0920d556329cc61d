"""Builds the native parts; everything else is in pyproject.toml.

They are plain shared libraries without Python's headers, loaded by `zeepo/native.py` for
`zeepo/optim/kernels.py` and `zeepo/memory/native_blocks.py`. They are optional: without a compiler
the package installs all the same, the optimizers use torch's operations and the disk tier
Python's, with the same results.
"""

import os

from setuptools import Extension, setup

FLAGS = [
    "-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default",
    "-fprefetch-loop-arrays",  # seven streams at the speed of memory: worth 3 to 8 %
]  # fmt: skip

kernels = Extension(
    "zeepo.optim._kernels",
    sources=["native/kernels.c"],
    depends=["native/kernels.h", "native/body.inc"],
    extra_compile_args=FLAGS,
    libraries=["m"],
    optional=True,
)
block_io = Extension(
    "zeepo.memory._block_io",
    sources=["native/block_io.c", "native/checksum.c", "native/checksum_avx2.c"],
    depends=["native/checksum.inc", "native/xxhash.h"],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=default"],
    optional=True,
)
setup(ext_modules=[] if os.environ.get("ZEEPO_WITHOUT_KERNELS") else [kernels, block_io])
