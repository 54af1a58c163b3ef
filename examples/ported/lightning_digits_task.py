"""The same digits as a quorate.Task: the module keeps its steps, and the loop is Quorate's."""

from lightning_digits import LitDigits, datasets

import quorate


class LitDigitsTask(quorate.Task):
    hidden_size: int = 64  # params in a job file; keyword `params` below
    learning_rate: float = 2e-3

    def model(self):
        return LitDigits(self.hidden_size, self.learning_rate)

    def datasets(self):
        training, validation = datasets()
        return training, validation

    def loss(self, model, batch):
        return model.training_step(batch)

    def optimizer(self, model):
        return model.configure_optimizers()

    def metrics(self, model, batch):
        return model.validation_step(batch)


if __name__ == "__main__":
    job = quorate.Job(
        task=LitDigitsTask, lanes=4, batch_size=64, epochs=10, seed=42, evaluate={"metric": "val_loss", "mode": "min"}
    )
    print(quorate.train(job).metrics)
