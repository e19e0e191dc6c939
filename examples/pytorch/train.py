# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small self-attention model on jagged histories with two backends and compares the loss curves.

    python train.py path/to/libjfa.so path/to/lengths.txt [--steps 60] [--backends cuda,cpu] [--out losses.json]

The task: each history is a sequence of items; the next item is the most frequent one of the last eight, which attention can
learn and a per-item model cannot. Both runs start from the same weights and see the same batches, in bf16 attention over fp32
weights.
"""

import argparse
import json
import sys

import torch
import torch.nn.functional as F
from jfa_torch import JaggedAttention

ITEMS, WIDTH, HEADS, DIM = 64, 128, 2, 64


class Model(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.items = torch.nn.Embedding(ITEMS, WIDTH)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * HEADS * DIM, bias=False) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(HEADS * DIM, WIDTH, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, ITEMS)

    def forward(self, batch, items):
        x = self.items(items)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = (t for t in qkv(F.layer_norm(x, (WIDTH,))).to(torch.bfloat16).view(-1, 3, HEADS, DIM).unbind(1))
            x = x + out(self.attention(batch, q, k, v).flatten(1).float())
        return self.head(F.layer_norm(x, (WIDTH,)))


def batches(lengths, size, steps):
    """Items and targets of `steps` batches, on the host."""
    g = torch.Generator().manual_seed(3)
    for _ in range(steps):
        picked = [min(lengths[i], 256) for i in torch.randint(len(lengths), (size,), generator=g).tolist()]
        offsets = torch.tensor([0, *torch.tensor(picked).cumsum(0).tolist()], dtype=torch.int32)
        items = torch.randint(ITEMS, (int(offsets[-1]),), generator=g)
        target = items.clone()
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
            counts = F.one_hot(items[a:b], ITEMS).float().cumsum(0)
            counts[8:] -= counts[:-8].clone()
            target[a:b] = (counts + torch.arange(ITEMS, 0, -1) * 1e-3).argmax(1)
        yield offsets, items, target


def train(library, backend, lengths, steps, size=16):
    device = "cpu" if backend == "cpu" else "cuda"
    capacity = size * 256
    attention = JaggedAttention(library, HEADS, DIM, size, capacity, torch.bfloat16, device=device, backend=backend, causal=True, deterministic=True)
    torch.manual_seed(1)
    model = Model(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for offsets, items, target in batches(lengths, size, steps):
        batch = attention.schedule(offsets.to(device))
        loss = F.cross_entropy(model(batch, items.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def main():
    a = argparse.ArgumentParser()
    a.add_argument("library")
    a.add_argument("lengths")
    a.add_argument("--steps", type=int, default=60)
    a.add_argument("--backends", default="cuda,cpu")
    a.add_argument("--out")
    args = a.parse_args()
    lengths = [int(x) for x in open(args.lengths) if x.strip()]
    torch.backends.cuda.matmul.allow_tf32 = False
    curves = {name: train(args.library, name, lengths, args.steps) for name in args.backends.split(",")}
    for step in range(0, args.steps, max(args.steps // 10, 1)):
        print(f"step {step:4d}  " + "  ".join(f"{name} {curve[step]:.4f}" for name, curve in curves.items()))
    if args.out:
        with open(args.out, "w") as f:
            json.dump(curves, f)
    first, *others = curves.values()
    apart = max((abs(x - y) / x for other in others for x, y in zip(first, other)), default=0.0)
    print(f"loss {first[0]:.3f} -> {first[-1]:.3f}; curves apart by at most {100 * apart:.2f} %")
    if first[-1] > 0.8 * first[0] or apart > 0.03:
        sys.exit("WRONG: it does not learn, or the backends disagree")
    print("ok")


if __name__ == "__main__":
    main()
