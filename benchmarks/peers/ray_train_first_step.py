"""The same step in the workers of a TorchTrainer, with DistributedDataParallel over Gloo."""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from benchmarks.cases import CASES
from benchmarks.first_step import first_step


def train(config: dict[str, str]) -> None:
    """Note when the step was complete in this worker."""
    ended = first_step(prepare_model(CASES["tiny-mlp"].build()))
    context = ray.train.get_context()
    Path(config["folder"], f"worker-{context.get_world_rank()}").write_text(str(ended))


def main() -> None:
    """Print when it was so everywhere."""
    workers, folder = int(sys.argv[1]), Path(sys.argv[2])
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(folder / "storage")),
    )
    trainer.fit()
    moments = [float(file.read_text()) for file in folder.glob("worker-*")]
    assert len(moments) == workers, f"{len(moments)} of {workers} workers have taken a step"
    print(max(moments), flush=True)


if __name__ == "__main__":
    main()
