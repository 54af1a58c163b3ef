"""Which of four topics a short text is about, with accelerate: padding, a warm-up, accumulation, clipping."""

import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

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


def main():
    set_seed(42)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train_loader = DataLoader(make_texts(640, 1), batch_size=32, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(make_texts(160, 2), batch_size=32, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["tokens"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right, total = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["tokens"]).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.3f}")


if __name__ == "__main__":
    main()
