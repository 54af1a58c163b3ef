"""Handwritten digits, ported from Lightning: the module keeps its steps, and the trainer becomes four lines."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import quorate


class LitDigits(nn.Module):
    def __init__(self, hidden_size=64, learning_rate=2e-3):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * 8, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden_size, 10),
        )

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch):
        x, y = batch
        return F.nll_loss(self(x), y)

    def validation_step(self, batch):
        x, y = batch
        logits = self(x)
        preds = torch.argmax(logits, dim=1)
        return {"val_loss": F.nll_loss(logits, y), "val_acc": (preds == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])


def main(run):
    training, validation = datasets()
    module = LitDigits()
    module, _ = run.prepare(module, module.configure_optimizers())
    run.evaluate(validation, module.validation_step)
    for _ in run.epochs():
        for batch in run.batches(training):
            run.step(module.training_step(batch))


if __name__ == "__main__":
    result = quorate.launch(main, lanes=4, batch_size=64, epochs=10, seed=42, evaluate={"metric": "val_loss"})
    print(result.metrics)
