"""What users do between the calls: read and write parameters, gradients and state; copies, GANs."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from .harness import Observations, Start, case
from .models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    LanguageModel,
    Perceptron,
    perceptron_loss,
    points,
    tokens,
    train,
    train_language,
)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@case("reads_between_calls")
def reads_between_calls(start: Start) -> Observations:
    """Sums, norms, data and gradients, read at every point of the step."""
    model = LanguageModel(head="tied")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            yield "sums", [p.sum() for p in model.parameters()]
            loss = model(*tokens(step))
            yield "norms", [p.norm() for p in model.parameters()]
            loss.backward()
            yield "gradients", [p.grad for p in model.parameters()]
            yield "gradient norms", [p.grad.norm() for p in model.parameters()]
            optimizer.step()
            yield "data", [p.data for p in model.parameters()]
            optimizer.zero_grad()
            yield "gone", [p.grad is None for p in model.parameters()]
            yield "loss", loss


@case("reads_in_other_ways")
def reads_in_other_ways(start: Start) -> Observations:
    """numpy, lists, text, foreach functions, a dictionary, one element, a stack of slices."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            loss = perceptron_loss(model, step)
            loss.backward()
            weights, grads = list(model.parameters()), [p.grad for p in model.parameters()]
            yield "numpy", float(weights[2].detach().numpy().sum())
            yield "gradient numpy", float(grads[2].numpy().sum())
            yield "list", model.last.bias.tolist()
            yield "text", repr(model.middle[0].bias)
            yield "foreach norms", torch._foreach_norm(weights)
            yield "foreach gradient norms", torch._foreach_norm(grads)
            yield "element", model.middle[3].weight[3, 4].item()
            yield "stack", torch.stack([layer.weight[0] for layer in model.middle])
            yield "vector", parameters_to_vector(model.parameters())
            yield "equal", [torch.equal(p, p.clone()) for p in weights]
            yield "by name", dict(model.named_parameters())["middle.1.weight"].max()
            yield "by path", model.get_parameter("middle.2.weight").detach().std()
            yield "gradient cosine", F.cosine_similarity(grads[2].flatten(), grads[4].flatten(), 0)
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("reads_of_optimizer_state")
def reads_of_optimizer_state(start: Start) -> Observations:
    """The user reads the optimizer's moments, and halves one."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            yield "moment", [optimizer.state[p]["exp_avg"].sum() for p in model.parameters()]
            yield "steps", [optimizer.state[p]["step"].item() for p in model.parameters()]
            if step == 3:
                optimizer.state[model.middle[2].weight]["exp_avg"].mul_(0.5)
                optimizer.state[model.last.bias]["exp_avg_sq"].zero_()


@case("writes_through_old_list")
def writes_through_old_list(start: Start) -> Observations:
    """Every way to change a parameter, through a list collected before init."""
    model = Perceptron()
    optimizer = _adamw(model)
    old = list(model.parameters())
    with start(model, optimizer):
        for step in range(8):
            chosen = old[2 * (step % 7)]
            if step == 0:
                chosen.data.mul_(0.9)
            elif step == 1:
                with torch.no_grad():
                    chosen.add_(0.01)
            elif step == 2:
                chosen.data = torch.linspace(-0.3, 0.3, chosen.numel()).view(chosen.shape)
            elif step == 3:
                with torch.no_grad():
                    chosen[0] = 0.125
                    chosen[1, 2:5].fill_(-0.25)
            elif step == 4:
                chosen.data.copy_(torch.full_like(chosen, 0.02))
            elif step == 5:
                nn.init.xavier_uniform_(chosen)
            elif step == 6:
                chosen.detach().clamp_(-0.1, 0.1)
            else:
                with torch.no_grad():
                    torch._foreach_mul_(old, 0.99)
                    vector_to_parameters(parameters_to_vector(old) * 1.01, old)
            yield "changed", chosen
            yield from train(model, optimizer, range(step, step + 1))
            yield "same objects", all(a is b for a, b in zip(old, model.parameters(), strict=True))


@case("writes_of_gradients")
def writes_of_gradients(start: Start) -> Observations:
    """Every way to change a gradient before the step."""
    model = Perceptron()
    optimizer = _adamw(model)
    old = list(model.parameters())
    with start(model, optimizer):
        for step in range(8):
            loss = perceptron_loss(model, step)
            loss.backward()
            chosen = old[2 * (step % 7)]
            assert chosen.grad is not None
            if step == 0:
                chosen.grad.mul_(0.5)
            elif step == 1:
                chosen.grad = None
            elif step == 2:
                chosen.grad = torch.linspace(-0.3, 0.3, chosen.numel()).view(chosen.shape)
            elif step == 3:
                chosen.grad.data.clamp_(-0.01, 0.01)
            elif step == 4:
                chosen.grad += 0.01 * chosen.detach()
            elif step == 5:
                chosen.grad[0] = 0
                chosen.grad.data = torch.ones_like(chosen)
            elif step == 6:
                chosen.grad.copy_(torch.randn(chosen.shape))
            else:
                torch._foreach_mul_([p.grad for p in old], 0.5)
                chosen.grad = chosen.grad / chosen.grad.norm()
            yield "changed", chosen.grad
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("gradients_swapped_by_user")
def gradients_swapped_by_user(start: Start) -> Observations:
    """SAM: ascend along the gradient, a second backward there, back again, then the step."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    with start(model, optimizer):
        for step in range(5):
            perceptron_loss(model, step).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = []
            with torch.no_grad():
                for p in model.parameters():
                    move = p.grad * (0.05 / norm)
                    p.add_(move)
                    moves.append(move)
            optimizer.zero_grad()
            loss = perceptron_loss(model, step)
            loss.backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, norm)


@case("step_by_hand")
def step_by_hand(start: Start) -> Observations:
    """The user updates the parameters alone; the optimizer joins later."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            if step < 3:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.05 * p.grad
                        p.grad = None
            else:
                optimizer.step()
                optimizer.zero_grad()
            yield "loss", loss


def _register_averages() -> None:
    for inside in (False, True):

        @case(f"averaged_model_{'after' if inside else 'before'}_init")
        def program(start: Start, inside: bool = inside) -> Observations:
            model = LanguageModel(head="tied")
            optimizer = _adamw(model)
            function = get_ema_multi_avg_fn(0.9)
            average = None if inside else AveragedModel(model, multi_avg_fn=function)
            with start(model, optimizer):
                average = average or AveragedModel(model, multi_avg_fn=function)
                for step in range(6):
                    yield from train_language(model, optimizer, range(step, step + 1))
                    average.update_parameters(model)
                    with torch.no_grad():
                        out = average(*tokens(50 + step))
                    yield "average", out
                yield "averages", average.state_dict()


_register_averages()


@case("averaged_weights_with_batch_norm")
def averaged_weights_with_batch_norm(start: Start) -> Observations:
    """SWA: equal weights, and batch norm's statistics computed at the end."""
    parts: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN)]
    for _ in range(4):
        parts += [nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)]
    model = nn.Sequential(*parts, nn.Linear(HIDDEN, OUTPUTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    average = AveragedModel(model)
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            average.update_parameters(model)
        update_bn([points(step)[0] for step in range(3)], average)
        yield "averages", average.state_dict()


@case("average_by_hand")
def average_by_hand(start: Start) -> Observations:
    """A dictionary of shadow weights, lerped each step, swapped in for eval and out again."""
    model = Perceptron()
    optimizer = _adamw(model)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    with start(model, optimizer):
        for step in range(5):
            yield from train(model, optimizer, range(step, step + 1))
            with torch.no_grad():
                for name, p in model.named_parameters():
                    shadow[name].lerp_(p, 0.1)
                backup = {name: p.detach().clone() for name, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    p.copy_(shadow[name])
                value = perceptron_loss(model, 50 + step)
                for name, p in model.named_parameters():
                    p.copy_(backup[name])
            yield "eval", value


@case("gan")
def gan(start: Start) -> Observations:
    """Two models, two optimizers, the generator's loss through the discriminator."""
    generator = nn.Sequential(
        nn.Linear(5, 31), nn.ReLU(), nn.Linear(31, 33), nn.ReLU(), nn.Linear(33, INPUTS)
    )
    discriminator = Perceptron(depth=3)
    make = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    judge = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    with start([generator, discriminator], [make, judge]):
        for step in range(6):
            fake = generator(torch.randn(4, 5))
            judged = discriminator(points(step)[0]).mean() - discriminator(fake.detach()).mean()
            judge.zero_grad()
            judged.backward()
            judge.step()
            make.zero_grad()
            made = discriminator(fake).mean()
            made.backward()
            make.step()
            yield "loss", (judged, made)


@case("deepcopy_inside_session")
def deepcopy_inside_session(start: Start) -> Observations:
    """copy.deepcopy of the model in the middle gives an ordinary model that goes its own way."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        yield from train(model, optimizer, range(3))
        twin = copy.deepcopy(model)
        own = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(3, 6):
            yield from train(model, optimizer, range(step, step + 1))
            yield from train(twin, own, range(step, step + 1))
        yield "twin", twin.state_dict()


@case("functional_call")
def functional_call(start: Start) -> Observations:
    """torch.func.functional_call with some parameters replaced, beside the ordinary call."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            x, y = points(step)
            changed = {f"middle.{i}.weight": model.middle[i].weight * 0.9 for i in (0, 2, 4)}
            out = torch.func.functional_call(model, changed, (x,))
            loss = F.mse_loss(out, y) + 0.5 * F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("per_sample_gradients", whole=True)
def per_sample_gradients(start: Start) -> Observations:
    """vmap of grad of functional_call: the squared gradient of every sample."""
    model = Perceptron()
    optimizer = _adamw(model)

    def sample_loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor):  # type: ignore[no-untyped-def]
        return F.mse_loss(torch.func.functional_call(model, values, (x,)), y)

    with start(model, optimizer):
        for step in range(5):
            values = {name: p.detach() for name, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(sample_loss), (None, 0, 0))
            yield "sample gradients", each(values, *points(step))
            yield from train(model, optimizer, range(step, step + 1))


class Fragile(Perceptron):
    """Fails in the middle of its forward when told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs to outputs, or fail."""
        x = torch.tanh(self.first(x))
        for number, layer in enumerate(self.middle):
            x = torch.tanh(layer(x))
            if self.fails and number == 2:
                raise ValueError("bad batch")
        return self.last(x)


@case("exception_in_forward")
def exception_in_forward(start: Start) -> Observations:
    """A batch that fails in the forward, one in the backward; training goes on with the next."""
    model = Fragile()
    optimizer = _adamw(model)

    def refuse(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bad gradient")

    with start(model, optimizer):
        for step in range(8):
            model.fails = step % 3 == 1
            try:
                loss = perceptron_loss(model, step)
            except ValueError:
                continue
            if step == 3:
                out = model(points(step)[0])
                out.register_hook(refuse)
                try:
                    out.sum().backward()
                except RuntimeError:
                    optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
