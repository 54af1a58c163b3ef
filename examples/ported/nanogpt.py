"""A GPT on the characters of Shakespeare, ported from a loop in the manner of nanoGPT's train.py."""

import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import quorate

text = os.environ.get("TEXT", "data/shakespeare/shakespeare.txt")
eval_interval = 100
log_interval = 10
batch_size = 32
block_size = 64
n_layer, n_head, n_embd, dropout = 2, 4, 64, 0.1
learning_rate, min_lr, weight_decay, grad_clip = 3e-3, 3e-4, 1e-1, 1.0
max_iters, warmup_iters = 400, 20

data = np.fromfile(text, dtype=np.uint8).astype(np.int64)
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


class Windows(torch.utils.data.Dataset):
    def __init__(self, data, stride=1):
        self.data, self.stride = data, stride

    def __len__(self):
        return (len(self.data) - block_size - 1) // self.stride + 1

    def __getitem__(self, i):
        x = torch.from_numpy(self.data[i * self.stride : i * self.stride + block_size + 1])
        return x[:-1], x[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, n_head, c // n_head).transpose(1, 2) for p in self.attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.drop(self.proj(y))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.blocks(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def main(run):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    run.clip(grad_clip)
    run.evaluate(Windows(val_data, block_size), lambda batch: {"loss": model(*batch)[1]})
    t0 = time.time()
    for X, Y in run.batches(Windows(train_data)):
        logits, loss = model(X, Y)
        result = run.step(loss)
        if result is not None and run.is_main and result.step % log_interval == 0:
            print(f"iter {result.step}: loss {result.loss:.4f}, time {time.time() - t0:.2f} s")
            t0 = time.time()


if __name__ == "__main__":
    quorate.launch(main, lanes=4, batch_size=batch_size, steps=max_iters, seed=1337, evaluate={"every": eval_interval})
