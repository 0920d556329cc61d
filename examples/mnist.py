"""Handwritten digits on four ranks: a plain training loop, and two lines of zeepo.

    python examples/mnist.py

MNIST, if its files are in `data/MNIST/raw` (or the folder that MNIST names); else scikit-learn's
digits, which are 8 x 8 and come with it.
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeepo


class SimpleCNN(nn.Module):
    """One convolution, one linear layer."""

    def __init__(self, size: int):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, kernel_size=3)
        self.relu = nn.ReLU()
        self.linear = nn.Linear(32 * (size - 2) * (size - 2), 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(self.relu(self.conv(images)).flatten(1))


def load_digits() -> TensorDataset:
    """Images of shape (1, size, size), from 0 to 1, and their labels."""
    folder = Path(os.environ.get("MNIST", "data/MNIST/raw"))
    if (folder / "train-images-idx3-ubyte.gz").exists():
        pixels = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28) / 255.0
        targets = np.frombuffer(labels, np.uint8, offset=8)
    else:
        from sklearn.datasets import load_digits as load_small_digits

        small = load_small_digits()
        images, targets = small.images[:, None] / 16.0, small.target
    return TensorDataset(torch.tensor(images).float(), torch.tensor(targets).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    loader = DataLoader(digits, batch_size=64, shuffle=True)
    model = SimpleCNN(size=digits.tensors[0].shape[-1])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    session = zeepo.init(zero_offload=True, num_gpus=args.ranks)
    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.6f}")
    whole_bytes = sum(p.nbytes for p in model.parameters())
    for kind, kept_bytes in session.stats().bytes_kept.items():
        print(f"this rank keeps {kept_bytes / whole_bytes:.0%} of the {kind}")
    zeepo.close()


if __name__ == "__main__":
    main()
