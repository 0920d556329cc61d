"""The demo: one GPT, trained by plain PyTorch and by zeepo in a quarter of the memory.

    python -m examples.demo            (from the repository's root; `make demo` does it)

`text` makes tokens of the standard library's sources, `train` is the training program (the only
part that imports torch and zeepo), `watch` runs it in a process of its own and samples that
process's resident memory from outside, `report` judges the two runs, `plot` draws them.
"""
