"""Which of four topics a short text is about, ported from accelerate."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import quorate

WORDS, TOPICS, EPOCHS, WARMUP = 500, 4, 4, 20


def make_texts(count, seed):
    """Texts of 5 to 30 words, of which most are of one topic."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        topic, length = draw.randrange(TOPICS), draw.randint(5, 30)
        own = range(1 + topic * 100, 101 + topic * 100)
        words = [draw.choice(own) if draw.random() < 0.3 else draw.randrange(1, WORDS) for _ in range(length)]
        texts.append((words, topic))
    return texts


def collate(samples):
    tokens = pad_sequence([torch.tensor(words) for words, _ in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([topic for _, topic in samples])}


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classify = nn.Linear(width, TOPICS)

    def forward(self, tokens):
        padding = tokens == 0
        encoded = self.encode(self.embed(tokens), src_key_padding_mask=padding)
        return self.classify(encoded.masked_fill(padding.unsqueeze(-1), 0).sum(1) / (~padding).sum(1, keepdim=True))


def main(run):
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    train_loader = run.batches(make_texts(640, 1), collate=collate)
    run.evaluate(
        make_texts(160, 2),
        lambda batch: {"accuracy": (model(batch["tokens"]).argmax(dim=-1) == batch["labels"]).float().mean()},
    )
    run.clip(1.0)
    for epoch in run.epochs():
        for batch in train_loader:
            loss = F.cross_entropy(model(batch["tokens"]), batch["labels"])
            run.step(loss)
        if run.is_main:
            print(f"epoch {epoch}: accuracy {run.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    quorate.launch(main, lanes=4, batch_size=64, accumulate=2, epochs=EPOCHS, seed=42)
