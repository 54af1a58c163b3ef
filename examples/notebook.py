# %% [markdown]
# # Quorate from Python
#
# Each `# %%` begins a cell in editors that know notebooks (open the folder `examples`). It is a script as well:
# `python examples/notebook.py` trains three times, a few seconds each.
#
# Workers import the task, so its class stands in a file of its own, here [digits.py](digits.py): a small CNN for 1,797
# handwritten digits of 8×8 pixels. In a notebook, a cell that begins with `%%writefile digits.py` writes such a file.

# %%
import torch
from digits import Digits  # type: ignore[import-not-found]  # beside this file

import quorate

# %% [markdown]
# ## A job, and what comes of it
#
# A job has the keys of a job file, and they are checked in the same way: write `lanse=4` and see.

# %%
job = quorate.Job(
    task=Digits,
    params={"learning_rate": 0.1},
    lanes=4,
    workers=1,
    batch_size=64,
    epochs=3,
    seed=7,
    schedule={"kind": "cosine", "warmup": 20},
)
first = quorate.train(job)
print(first)
print(f"{first.run}: accuracy {first.metrics['accuracy']:.4f} after {first.steps} steps, {first.wall_seconds:.1f} s")

# %% [markdown]
# ## The trained model
#
# It is an ordinary PyTorch module. `quorate.open_run("last")` finds a run again, tomorrow or in another notebook.

# %%
model = quorate.open_run(first.run).load_model()
model.eval()
_, validation = Digits().datasets()
images, labels = validation[:12]
with torch.no_grad():
    guesses = model(images).argmax(1)
print("these digits:", *labels.tolist())
print("it reads:    ", *guesses.tolist())

# %% [markdown]
# ## More workers, the same model
#
# The number of workers is only *how* a job runs: three end with the weights of one, to the last bit. `replace` gives a
# job that differs in some keys.

# %%
second = quorate.train(job.replace(workers=3))
print(f"on 1 worker:  {first.weights_digest}")
print(f"on 3 workers: {second.weights_digest}")
print("the same bits" if first.weights_digest == second.weights_digest else "not the same bits: please report it")

# %% [markdown]
# ## Another seed, another model
#
# The seed is one of the keys that say what a job *means*: it changes the bits.

# %%
third = quorate.train(job.replace(seed=8))
for seed, result in ((7, first), (8, third)):
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    print(f"{result.run} with seed {seed}: {metrics}, weights {result.weights_digest[:12]}…")
