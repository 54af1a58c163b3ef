"""A checkpoint as two workers write it who hold one half each of every tensor that has one."""

from dataclasses import replace
from typing import Any

import torch

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.pieces import Piece
from quorate.checkpoint.reshard import join_skeletons
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import encode

WORKERS = 2


def held(tree: Any, worker: int) -> Any:
    """The same with the rows of one worker in the place of each tensor that has rows for all."""
    if isinstance(tree, dict):
        return {key: held(value, worker) for key, value in tree.items()}
    if not isinstance(tree, torch.Tensor) or not tree.ndim or len(tree) < WORKERS:
        return tree
    rows = list(range(len(tree)))[len(tree) // WORKERS * worker :]
    rows = rows[: len(tree) // WORKERS] if worker < WORKERS - 1 else rows
    return Piece(tree[rows[0] : rows[-1] + 1], tuple(tree.shape), (rows[0],) + (0,) * (tree.ndim - 1))


def split(folder: CheckpointFolder, info: CheckpointInfo) -> CheckpointInfo:
    """Write a checkpoint again, in pieces, in the place of what it was."""
    state = folder.load(info).state
    states = [encode(held(state, worker)) for worker in range(WORKERS)]
    folder.remove(info.path)
    attempt = folder.open(info.cursor)
    for worker, each in enumerate(states):
        own = {name: tensor for name, tensor in each.tensors.items() if worker == 0 or "@" in name}
        attempt.write(worker, WORKERS, TensorFile(own).chunks())
    skeleton = join_skeletons(each.skeleton for each in states)
    return folder.commit(attempt.name, replace(info.manifest, skeleton=skeleton), lambda: None)
