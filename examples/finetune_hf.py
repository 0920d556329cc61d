"""Fine-tune a Hugging Face language model from a folder of safetensors, and write it back.

    python examples/finetune_hf.py --make-model base     (once: a small model with random values)
    python examples/finetune_hf.py base finetuned

The model is loaded lazily, trained with a learning rate that warms up and decays, judged by its
perplexity on text it has not seen, and exported as a folder that `from_pretrained` can load. A
token is a byte, so no tokenizer is needed; with a model of your own, use its tokenizer. The text is
Python's language reference, as `help()` shows it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    get_cosine_schedule_with_warmup,
)

import zeepo


def make_model(folder: Path, width: int, layers: int) -> None:
    """A small Llama of bytes with random values, so that nothing has to be downloaded."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and bytes to be judged on."""
    text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.uint8)
    return text[:-20_000], text[-20_000:]


def perplexity(model: PreTrainedModel, text: Tensor, length: int) -> float:
    """Between how many bytes the model hesitates, on average."""
    model.eval()
    with torch.no_grad():
        rows = text.unfold(0, length, length)[:16].long().split(4)
        losses = [model(input_ids=row, labels=row).loss for row in rows]
    model.train()
    return math.exp(torch.stack(losses).mean())


def finetune(args: argparse.Namespace) -> None:
    learn, judge = load_text()
    with zeepo.lazy(ram=args.ram, disk=args.disk):
        model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    with zeepo.init(model, optimizer, ram=args.ram, disk=args.disk) as session:
        print(f"perplexity before: {perplexity(model, judge, args.length):.2f}")
        model.train()
        for step in range(args.steps):
            starts = torch.randint(len(learn) - args.length, (4,)).tolist()
            batch = torch.stack([learn[s : s + args.length] for s in starts]).long()
            rate = schedule.get_last_lr()[0]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                print(f"step {step + 1:3}  loss {loss.item():.3f}  lr {rate:.1e}", flush=True)
        print(f"perplexity after: {perplexity(model, judge, args.length):.2f}")
        session.export(args.output)
        model.config.save_pretrained(args.output)
    print(f"{args.output}: {', '.join(sorted(path.name for path in args.output.iterdir()))}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="the folder to start from")
    parser.add_argument("output", type=Path, nargs="?", help="the folder to write")
    parser.add_argument("--make-model", type=Path, metavar="DIR", help="write a model there, end")
    parser.add_argument("--width", type=int, default=512, help="of the model that is made")
    parser.add_argument("--layers", type=int, default=8, help="of the model that is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="bytes in a row of a batch")
    parser.add_argument("--ram", default="300MiB", help="how much the process may grow by")
    parser.add_argument("--disk", default="/var/tmp", help="a folder for what does not fit")
    args = parser.parse_args(arguments)
    torch.manual_seed(1)
    if args.make_model:
        make_model(args.make_model, args.width, args.layers)
    elif args.model and args.output:
        finetune(args)
    else:
        parser.error("give the folders of the model and of the output, or --make-model DIR")


if __name__ == "__main__":
    main()
