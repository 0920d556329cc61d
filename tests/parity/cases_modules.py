"""torch.nn modules that read their parameters in their own ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .harness import Observations, Start, case
from .models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    VOCAB,
    Perceptron,
    images,
    sequences,
    tokens,
    train,
)


def _square_loop(
    start: Start,
    model: nn.Module,
    batch: Callable[[int], torch.Tensor],
    evaluate: bool = False,
    lr: float = 1e-2,
) -> Observations:
    """Train towards zero outputs; after each step perhaps evaluate in both grad-free modes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with start(model, optimizer):
        for step in range(5):
            model.train()
            loss = (model(batch(step)) - 0.3).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
            if evaluate:
                model.eval()
                with torch.no_grad():
                    first = model(batch(50 + step))
                with torch.inference_mode():
                    second = model(batch(60 + step))
                yield "eval", (first, second)


@case("transformer_encoder")
def transformer_encoder(start: Start) -> Observations:
    """nn.TransformerEncoder with an even number of heads: eval takes the fused fast path."""
    layer = nn.TransformerEncoderLayer(26, 2, 31, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4)
    yield from _square_loop(start, model, lambda step: sequences(step, 26), evaluate=True)


@case("transformer_encoder_padded")
def transformer_encoder_padded(start: Start) -> Observations:
    """The fast path with a padding mask goes through nested tensors."""
    layer = nn.TransformerEncoderLayer(26, 2, 31, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(26))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mask = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
    with start(model, optimizer):
        for step in range(5):
            model.train()
            loss = model(sequences(step, 26), src_key_padding_mask=mask)[~mask].pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                out = model(sequences(50 + step, 26), src_key_padding_mask=mask)
            yield "loss", loss
            yield "eval", out


class EncoderDecoder(nn.Module):
    """nn.Transformer on vectors, norm first and an odd number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(39, 3, 2, 2, 41, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Decode a part of the input from all of it."""
        return self.body(x, x[:, :4])


@case("transformer_decoder")
def transformer_decoder(start: Start) -> Observations:
    """nn.Transformer: cross attention in the decoder."""
    yield from _square_loop(start, EncoderDecoder(), lambda step: sequences(step, 39), True)


class Attending(nn.Module):
    """nn.MultiheadAttention: packed weights, separate weights, and extra bias rows."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(
            nn.MultiheadAttention(26, 2, batch_first=True) for _ in range(3)
        )
        self.separate = nn.MultiheadAttention(26, 2, kdim=13, vdim=11, batch_first=True)
        self.biased = nn.MultiheadAttention(26, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with each."""
        for layer in self.packed:
            x = x + layer(x, x, x, need_weights=False)[0]
        x = x + self.separate(x, x[..., :13], x[..., :11])[0]
        return x + self.biased(x, x, x)[0]


@case("multihead_attention")
def multihead_attention(start: Start) -> Observations:
    """MultiheadAttention reads its child's weights itself; its eval has a fast path too."""
    yield from _square_loop(start, Attending(), lambda step: sequences(step, 26), evaluate=True)


class Stack(nn.Module):
    """Recurrent layers between linear ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        makers: dict[str, Callable[[], nn.Module]] = {
            "lstm": lambda: nn.LSTM(23, 23, num_layers=2, batch_first=True, dropout=0.1),
            "lstm_projected": lambda: nn.LSTM(23, 29, 2, batch_first=True, proj_size=23),
            "gru": lambda: nn.GRU(23, 23, num_layers=2, batch_first=True),
            "rnn": lambda: nn.RNN(23, 23, num_layers=2, batch_first=True),
        }
        self.first = nn.Linear(INPUTS, 23)
        self.recurrent = nn.ModuleList(makers[kind]() for _ in range(5))
        self.backwards = nn.GRU(23, 12, batch_first=True, bidirectional=True)
        self.last = nn.Linear(24, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run along the sequence both ways."""
        x = torch.tanh(self.first(x))
        for layer in self.recurrent:
            x = layer(x)[0]
        return self.last(self.backwards(x)[0])


def _register_recurrent() -> None:
    for kind in ("lstm", "lstm_projected", "gru", "rnn"):

        @case(f"recurrent_{kind}")
        def program(start: Start, kind: str = kind) -> Observations:
            yield from _square_loop(start, Stack(kind), lambda step: sequences(step, INPUTS), True)


_register_recurrent()


class Packed(nn.Module):
    """Two GRUs and an LSTM over packed sequences, then cells by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 19)
        self.gru = nn.GRU(19, 23, num_layers=2)
        self.lstm = nn.LSTM(23, 17, num_layers=2)
        self.cell = nn.LSTMCell(17, 13)
        self.last = nn.Linear(13, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a token after the sequence."""
        packed = pack_padded_sequence(self.embed(x), [7, 4, 2], batch_first=True)
        out, _ = pad_packed_sequence(self.lstm(self.gru(packed)[0])[0])
        state = None
        for row in out:
            state = self.cell(row, state)
        assert state is not None
        return self.last(state[0])


@case("recurrent_packed")
def recurrent_packed(start: Start) -> Observations:
    """Packed sequences and a cell called once per position."""
    yield from _square_loop(start, Packed(), lambda step: tokens(step, rows=3)[0])


class Grouped(nn.Module):
    """Convolutions with groups, strides and batch norm; a transposed one brings the size back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 18, 3, padding=1),
            nn.BatchNorm2d(18),
            nn.ReLU(),
            *(nn.Conv2d(18, 18, 3, padding=1) for _ in range(4)),
            nn.Conv2d(18, 27, 3, groups=9, stride=2, bias=False),
            nn.GroupNorm(3, 27),
            nn.PReLU(27),
            nn.Conv2d(27, 27, 3, groups=27, padding=1),
            nn.Conv2d(27, 13, 1),
            nn.BatchNorm2d(13),
            nn.ConvTranspose2d(13, 5, 3, stride=2, output_padding=0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An image of as many pixels."""
        return self.body(x)


@case("convolution")
def convolution(start: Start) -> Observations:
    """A CNN with batch norm, groups and a transposed convolution."""
    yield from _square_loop(start, Grouped(), images, evaluate=True)


@case("channels_last")
def channels_last(start: Start) -> Observations:
    """The same with weights, images and gradients in channels_last memory."""
    model = Grouped().to(memory_format=torch.channels_last)

    def batch(step: int) -> torch.Tensor:
        return images(step).to(memory_format=torch.channels_last)

    yield from _square_loop(start, model, batch, evaluate=True)
    yield "strides", [tuple(p.stride()) for p in model.parameters()]


def _register_norms() -> None:
    variants: dict[str, Callable[[nn.Module], nn.Module]] = {
        "weight_norm": parametrizations.weight_norm,
        "weight_norm_old": nn.utils.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "spectral_norm_old": nn.utils.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
    }
    for name, wrap in variants.items():

        @case(name)
        def program(start: Start, wrap: Callable[[nn.Module], nn.Module] = wrap) -> Observations:
            layers: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN)]
            for _ in range(4):
                layers += [wrap(nn.Linear(HIDDEN, HIDDEN)), nn.Tanh()]
            model = nn.Sequential(*layers, nn.Linear(HIDDEN, OUTPUTS))

            def batch(step: int) -> torch.Tensor:
                return sequences(step, INPUTS, length=1)[:, 0]

            yield from _square_loop(start, model, batch, evaluate=True)


_register_norms()


class Bilinear(nn.Module):
    """Bilinear layers, fed with the hidden states and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 13)
        self.layers = nn.ModuleList(nn.Bilinear(13, INPUTS, 13) for _ in range(4))
        self.last = nn.Linear(13, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the input into every layer."""
        hidden = self.first(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden, x))
        return self.last(hidden)


@case("bilinear")
def bilinear(start: Start) -> Observations:
    """nn.Bilinear."""
    model = Bilinear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(5))


class Words(nn.Module):
    """Embeddings, perhaps with sparse gradients, and dense layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, sparse=sparse)
        self.bag = nn.EmbeddingBag(VOCAB, HIDDEN, mode="sum", sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(7))
        self.last = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits from the mean of the tokens and the sum of the bag."""
        hidden = self.embed(x).mean(1) + self.bag(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden)


def _train_words(
    start: Start, model: Words, optimizers: list[torch.optim.Optimizer]
) -> Observations:
    with start(model, optimizers):
        for step in range(6):
            x, y = tokens(step)
            loss = F.cross_entropy(model(x), y[:, -1])
            loss.backward()
            yield "sparse", [p.grad.is_sparse for p in model.parameters() if p.grad is not None]
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield "loss", loss


@case("sparse_gradients_sgd")
def sparse_gradients_sgd(start: Start) -> Observations:
    """Sparse gradients into plain SGD."""
    model = Words(sparse=True)
    yield from _train_words(start, model, [torch.optim.SGD(model.parameters(), lr=1e-1)])


@case("sparse_gradients_sparse_adam")
def sparse_gradients_sparse_adam(start: Start) -> Observations:
    """SparseAdam for the embeddings, AdamW for the rest."""
    model = Words(sparse=True)
    sparse = [*model.embed.parameters(), *model.bag.parameters()]
    dense = [*model.layers.parameters(), *model.last.parameters()]
    optimizers = [torch.optim.SparseAdam(sparse, lr=1e-2), torch.optim.AdamW(dense, lr=1e-2)]
    yield from _train_words(start, model, optimizers)


@case("sparse_gradients_accumulated")
def sparse_gradients_accumulated(start: Start) -> Observations:
    """Two sparse gradients added up, into Adagrad, which takes sparse ones."""
    model = Words(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-1)
    with start(model, optimizer):
        for step in range(5):
            for part in range(2):
                x, y = tokens(10 * step + part)
                loss = F.cross_entropy(model(x), y[:, -1])
                loss.backward()
                yield "loss", loss
            optimizer.step()
            optimizer.zero_grad()


@case("dropout_random_state")
def dropout_random_state(start: Start) -> Observations:
    """Dropout in train, none in eval, and the user's own random numbers between."""
    model = Perceptron(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            model.train()
            yield from train(model, optimizer, range(step, step + 1))
            model.eval()
            with torch.inference_mode():
                out = model(torch.randn(3, INPUTS))
            yield "eval", out.clone()
