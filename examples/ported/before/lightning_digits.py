"""Handwritten digits with Lightning, in the manner of its MNIST tutorial."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitDigits(L.LightningModule):
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

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        preds = torch.argmax(logits, dim=1)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", (preds == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])


def main():
    L.seed_everything(42)
    training, validation = datasets()
    train_loader = DataLoader(training, batch_size=64, shuffle=True, num_workers=2)
    val_loader = DataLoader(validation, batch_size=64, num_workers=2)
    trainer = L.Trainer(max_epochs=10, accelerator="auto", devices="auto")
    trainer.fit(LitDigits(), train_loader, val_loader)
    print(trainer.callback_metrics)


if __name__ == "__main__":
    main()
