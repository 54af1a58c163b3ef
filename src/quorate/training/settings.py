"""What a task sets for its optimizers and schedulers, apart from what training makes of it."""

from typing import Any

import torch


def taken_up(saved: Any, given_then: Any, given_now: Any) -> Any:
    """A saved setting as a job goes on with it: what training has made of it, unless another is given now.

    `given_then` is what the job began with that saved it. Of nested settings only those that were changed are new.
    """
    if same(given_then, given_now):
        return saved
    parts = (saved, given_then, given_now)
    if all(isinstance(part, dict) for part in parts):
        new = {key: _part(key, *parts) for key in given_now}
        return {key: value for key, value in saved.items() if key not in given_then} | new
    if all(isinstance(part, list | tuple) for part in parts) and len({len(part) for part in parts}) == 1:
        return type(given_now)(taken_up(*items) for items in zip(*parts, strict=True))
    return given_now


def rate_taken_up(saved: Any, given_then: Any, given_now: Any, is_scheduled: bool) -> Any:
    """A saved learning rate as a job goes on with it: where it is scheduled, as far along as it was."""
    if same(given_then, given_now):
        return saved
    if not is_scheduled or not given_then or same(saved, given_then):
        return given_now
    return saved * (given_now / given_then)


def same(left: Any, right: Any) -> bool:
    """Whether two settings are equal; not a number equals itself."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right or (left != left and right != right))  # NaN is what differs from itself


def _part(key: Any, saved: dict[Any, Any], given_then: dict[Any, Any], given_now: dict[Any, Any]) -> Any:
    if key in saved and key in given_then:
        return taken_up(saved[key], given_then[key], given_now[key])
    return given_now[key]
