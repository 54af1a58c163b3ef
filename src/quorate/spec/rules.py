"""What must hold between keys, each rule as the equation that does not hold, both numbers and where they were said."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from quorate.core.addresses import has_secret, shown_place
from quorate.core.errors import Problem
from quorate.spec.engine import secret_keys

OWN_PLACE = "checkpoints"
"""How `checkpoint.to` names the folder of that name in the run folder."""

AUTO = "auto"
LOSS_SCALE = {"initial": 2**16, "growth_interval": 2000}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")

Told = Callable[[str], str]
"""Where the value of a key was said, to stand behind it: " (--workers)"; nothing where that is not known."""

Job = Mapping[str, Any]

_LANE_EACH = frozenset({"ring", "ddp", "parameter-server"})
"""Kinds of strategy in which each worker hosts a lane at least, and no lane is hosted twice."""


def _workers_fit_lanes(job: Job, told: Told) -> Iterator[Problem]:
    workers, lanes, strategy = job["workers"], job["lanes"], job["strategy"]
    kind = strategy if isinstance(strategy, str) else dict(strategy).get("kind")
    if workers != "auto" and workers > lanes and kind in _LANE_EACH:
        yield Problem(
            "workers",
            f"{workers} workers{told('workers')} cannot share {lanes} lanes{told('lanes')}: each worker hosts at least "
            f"one lane, and {workers} > {lanes}",
            f"Use at most {lanes} workers, or raise lanes (which changes what the job computes).",
        )


def _workers_take_turns(job: Job, told: Told) -> Iterator[Problem]:
    """With synchronized batch norm all workers make the same number of passes, whoever is there."""
    strategy, workers, lanes = job["strategy"], job["workers"], job["lanes"]
    if isinstance(strategy, str) or not dict(strategy).get("sync_batch_norm"):
        return
    what = f"strategy.sync_batch_norm{told('strategy.sync_batch_norm')}"
    if workers == AUTO:
        yield Problem("workers", f"{what} needs a fixed number of workers", "Write workers: 4.")
        return
    if lanes % workers:
        yield Problem(
            "workers",
            f"{workers} workers{told('workers')} do not have equal numbers of the {lanes} lanes{told('lanes')}, which "
            f"{what} needs: {lanes} = {lanes // workers} × {workers} + {lanes % workers}",
            "Use a number of workers that divides lanes.",
        )
    if job["min_workers"] != workers:
        yield Problem(
            "min_workers",
            f"with {what}, {job['min_workers']}{told('min_workers')} of {workers} workers would normalize by the "
            "statistics of other samples",
            f"Write min_workers: {workers}.",
        )
    for key, value in (("balance", "speed"), ("last_batch", "keep"), ("on_bad_sample", "skip")):
        if job[key] == value:
            text = f"{value}{told(key)} lets workers make different numbers of passes, in which {what} needs them all"
            yield Problem(key, text, f"Leave {key} out, or sync_batch_norm.")


def _workers_fill_mesh(job: Job, told: Told) -> Iterator[Problem]:
    """A sharded gang is there in full, or not at all."""
    strategy, workers, lanes = job["strategy"], job["workers"], job["lanes"]
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    if given.get("kind") != "fsdp":
        return
    said, across = told("strategy"), given.get("replicate", 1) * given.get("tensor", 1)
    shard = given.get("shard")
    if workers == "auto":
        yield Problem("workers", f"strategy: fsdp{said} needs a fixed number of workers", "Write workers: 4.")
        return
    if workers % across or (shard is not None and workers != across * shard):
        parts = " × ".join(f"{key} {given[key]}" for key in ("replicate", "shard", "tensor") if given.get(key))
        yield Problem(
            "workers",
            f"{workers} workers{told('workers')} are not the {parts}{said} of the mesh",
            f"Use workers: {across * (shard or 1)}, or another mesh.",
        )
        return
    groups = workers // given.get("tensor", 1)
    if lanes % groups:
        yield Problem(
            "lanes",
            f"{lanes} lanes{told('lanes')} cannot be shared evenly by {groups} groups of workers{said}, which compute "
            f"in step: {lanes} is not a multiple of {groups}",
            f"Use lanes: {-(-lanes // groups) * groups} (which changes what the job computes), or another mesh.",
        )
    if job["min_workers"] not in (1, workers):
        hint = "Leave min_workers out."
        yield Problem("min_workers", f"strategy: fsdp{said} trains with all {workers} workers, or not at all", hint)
    if job["spares"]:
        hint = "Leave spares out: another process takes the place of one that is lost."
        yield Problem("spares", f"each worker of strategy: fsdp{said} has a part of its own", hint)
    if job["balance"] == "speed":
        hint = "Leave balance out."
        yield Problem("balance", f"the workers of strategy: fsdp{said} compute in step, with as many lanes each", hint)


def _sharded_in_step(job: Job, told: Told) -> Iterator[Problem]:
    """Workers of a mesh make as many passes each, or they would wait for each other without end."""
    strategy = job["strategy"]
    if (strategy if isinstance(strategy, str) else dict(strategy).get("kind")) != "fsdp":
        return
    refused = {
        "last_batch": ("keep", "drop", "the last batch of an epoch may leave lanes without a sample"),
        "on_bad_sample": ("skip", "fail", "a lane may be left without a sample"),
        "compile": (True, "auto", "a model that is gathered on the way is not compiled in this version"),
        "batch_size": (AUTO, "64", "the largest batch is looked for on one device (`quorate plan` says what fits)"),
    }
    for key, (value, instead, why) in refused.items():
        if job[key] == value and job[key] is not False:
            shown = str(value).lower()
            yield Problem(
                key,
                f"{shown}{told(key)} is not possible with strategy: fsdp{told('strategy')}: {why}",
                f"Use {key}: {instead}.",
            )


def _fewest_workers_fit(job: Job, told: Told) -> Iterator[Problem]:
    least = job["min_workers"]
    most_key = "lanes" if job["workers"] == "auto" else "workers"
    most = job[most_key]
    if least > most:
        yield Problem(
            "min_workers",
            f"the job would never begin: it waits for {least} workers{told('min_workers')} and can have "
            f"{most} ({most_key}{told(most_key)}), and {least} > {most}",
            f"Use a min_workers of at most {most}.",
        )


def _batch_feeds_lanes(job: Job, told: Told) -> Iterator[Problem]:
    batch_size, lanes, accumulate = job["batch_size"], job["lanes"], job["accumulate"]
    if batch_size == AUTO:
        return
    least = lanes * accumulate
    parts = f" × accumulate {accumulate}{told('accumulate')}" if accumulate > 1 else ""
    if batch_size < least:
        yield Problem(
            "batch_size",
            f"a batch of {batch_size}{told('batch_size')} cannot be shared by {lanes} lanes{told('lanes')}{parts}: "
            f"each gets at least one sample, and {batch_size} < {least}",
            f"Use a batch_size of at least {least}, or fewer lanes (which changes what the job computes).",
        )


def _one_length(job: Job, told: Told) -> Iterator[Problem]:
    epochs, steps = job["epochs"], job["steps"]
    if epochs is None and steps is None:
        hint = "Say how long to train: epochs: 3 or steps: 1000."
        yield Problem("epochs", "neither epochs nor steps is given", hint)
    if epochs is not None and steps is not None:
        both = f"both epochs: {epochs}{told('epochs')} and steps: {steps}{told('steps')} are given"
        yield Problem("epochs", both, "Keep exactly one of them.")


def _schedule_is_whole(job: Job, told: Told) -> Iterator[Problem]:
    """Without a kind it only says how often the task's own schedule steps."""
    given = dict(job["schedule"] or {})
    if job["schedule"] is None or given.get("kind") is not None:
        return
    if any(given.get(key) for key in ("warmup", "final")) or given.get("per") is None:
        yield Problem(
            "schedule.kind",
            f"schedule{told('schedule')} has no kind",
            "Write kind: constant, linear or cosine; or only per: epoch, for a schedule that the task returns.",
        )


def _early_stop_sees_evaluations(job: Job, told: Told) -> Iterator[Problem]:
    if job["early_stop"] is not None and dict(job["evaluate"] or {}).get("every") == "end":
        yield Problem(
            "early_stop",
            f"it watches the evaluations during training, and with evaluate.every: end{told('evaluate.every')} there "
            "are none",
            "Use evaluate.every: epoch or a number of steps, or leave early_stop out.",
        )


def _lineage_leads_here(job: Job, told: Told) -> Iterator[Problem]:
    ends = [dict(part)["until"] for part in job["lineage"]]
    said, steps = told("lineage"), job["steps"]
    if ends != sorted(set(ends)):
        text = f"its parts{said} end after steps {', '.join(map(str, ends))}"
        yield Problem("lineage", text, "Each begins where the one before it ends: write them in order.")
    elif ends and steps is not None and ends[-1] >= steps:
        text = f"its last part{said} ends after step {ends[-1]}, and the job after {steps}{told('steps')}"
        yield Problem("lineage", text, "Use more steps, or leave that part out.")
    if ends and job["early_stop"] is not None:
        text = f"a part of it{said} might end before its step by early_stop{told('early_stop')}"
        yield Problem("lineage", text, "Leave early_stop out.")


def _strategy_is_whole(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    said = told("strategy.mode")
    if given.get("kind") == "parameter-server":
        mode, staleness = given.get("mode", "synchronous"), given.get("staleness")
        if mode == "bounded" and staleness is None:
            hint = "Write how many steps a unit of work may run ahead of the oldest unapplied one: staleness: 4."
            yield Problem("strategy.staleness", f"mode: bounded{said} needs a bound, and none is given", hint)
        if mode != "bounded" and staleness is not None:
            yield Problem(
                "strategy.staleness",
                f"{staleness}{told('strategy.staleness')} bounds nothing in mode: {mode}",
                "Leave it out, or write mode: bounded.",
            )
        if mode == "synchronous" and given.get("damping"):
            hint = "Leave it out, or write mode: bounded or mode: asynchronous."
            yield Problem("strategy.damping", f"in mode: synchronous{said} no gradient is late", hint)
        if mode != "synchronous" and given.get("compress") is not None:
            hint = "Leave compress out, or write mode: synchronous."
            yield Problem("strategy.compress", f"in mode: {mode}{said} gradients travel whole", hint)
    if given.get("compress") is not None:
        rule = _one_gang_compression if given.get("kind") == "ddp" else _one_compression
        yield from rule(dict(given["compress"]), told("strategy.compress"))


def _units_have_no_steps(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    mode = "synchronous" if isinstance(strategy, str) else dict(strategy).get("mode", "synchronous")
    if mode == "synchronous":
        return
    said = told("strategy.mode")
    if job["balance"] == "speed":
        yield Problem(
            "balance",
            f"in strategy.mode: {mode}{said} work goes to whoever is free, and lanes are not shared out",
            "Leave balance out: who is slow gets less to do by itself.",
        )
    if job["average"] is not None:
        yield Problem(
            "average",
            f"it moves with each step, and in strategy.mode: {mode}{said} the weights after a step are "
            "nowhere all at once",
            "Leave average out, or use strategy.mode: synchronous.",
        )


def _one_compression(compress: dict[str, Any], said: str) -> Iterator[Problem]:
    kinds = [kind for kind in ("top_k", "random_k", "bits") if compress.get(kind) is not None]
    if len(kinds) != 1:
        named = " and ".join(kinds) + " are given" if kinds else "nothing of top_k, random_k and bits is given"
        yield Problem("strategy.compress", f"{named}{said}", "Give exactly one: {top_k: 0.01}, or {bits: 8}.")
    if compress.get("momentum") is not None and (kinds == ["bits"] or not compress.get("feedback", True)):
        yield Problem(
            "strategy.compress.momentum",
            f"it corrects what is held back{said}, and nothing is",
            "Use it with top_k or random_k, and with feedback.",
        )


def _one_gang_compression(compress: dict[str, Any], said: str) -> Iterator[Problem]:
    kinds = [kind for kind in ("dtype", "rank") if compress.get(kind) is not None]
    if len(kinds) != 1:
        named = "dtype and rank are given" if kinds else "neither dtype nor rank is given"
        yield Problem("strategy.compress", f"{named}{said}", "Give exactly one: {dtype: bf16}, or {rank: 2}.")


def _device_fits_strategy(job: Job, told: Told) -> Iterator[Problem]:
    what = _on_cpus_alone(job["strategy"])
    if job["device"] == "cuda" and what is not None:
        yield Problem(
            "device",
            f"{what}{told('strategy')} computes on the CPU in this version, and not on device: cuda{told('device')}",
            f"Leave {what.partition(':')[0]} out, or use device: cpu.",
        )


def _on_cpus_alone(strategy: Any) -> str | None:
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    mode = given.get("mode", "synchronous")
    if given.get("compress") is not None and given.get("kind") != "ddp":
        return "strategy.compress"
    return None if mode == "synchronous" else f"strategy.mode: {mode}"


def _loss_scale_is_used(job: Job, told: Told) -> Iterator[Problem]:
    precision, strategy, scale = job["precision"], job["strategy"], dict(job["loss_scale"])
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    kind, compress = given.get("kind"), given.get("compress")
    if precision == "fp16" and kind == "ddp" and compress is not None and dict(compress).get("rank") is not None:
        yield Problem(
            "precision",
            f"fp16{told('precision')} scales the loss by a number that changes, and strategy.compress.rank"
            f"{told('strategy.compress')} adds what it holds back of one step to the gradients of the next",
            "Use compress: {dtype: fp16} or leave compress out, or use precision: bf16 or fp32.",
        )
    if precision == "fp16" and (kind not in ("ring", "ddp") or (kind == "ring" and compress is not None)):
        what = "strategy.compress" if kind == "ring" else f"strategy: {kind}"
        yield Problem(
            "precision",
            f"fp16{told('precision')} scales the loss, and judges the sum of all gradients in every worker, which none "
            f"has with {what}{told('strategy')}",
            "Use the ring without compress, ddp, or precision: bf16 or fp32.",
        )
    if precision != "fp16" and any(scale.get(key, usual) != usual for key, usual in LOSS_SCALE.items()):
        yield Problem(
            "loss_scale",
            f"it{told('loss_scale')} scales nothing with precision: {precision}{told('precision')}",
            "Leave it out, or write precision: fp16.",
        )


def _shrinking_is_agreed(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    kind = strategy if isinstance(strategy, str) else dict(strategy).get("kind")
    if job["on_out_of_memory"] == "shrink" and kind != "ring":
        yield Problem(
            "on_out_of_memory",
            f"shrink{told('on_out_of_memory')} needs all workers to do a step again together, and strategy: {kind}"
            f"{told('strategy')} does not",
            "Use on_out_of_memory: fail with a larger accumulate, or strategy: ring.",
        )


def _gradients_are_whole(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    kind = strategy if isinstance(strategy, str) else dict(strategy).get("kind")
    if job["check_gradients"] is not None and kind not in ("ring", "ddp"):
        yield Problem(
            "check_gradients",
            f"workers compare the sum of all gradients{told('check_gradients')}, which none of them holds with "
            f"strategy: {kind}{told('strategy')}",
            "Leave it out, or use strategy: ring or ddp.",
        )


def _lanes_are_recorded(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    has_lanes = given.get("kind") == "ring" or given.get("mode", "synchronous") == "synchronous"
    if job["record"] is not None and (given.get("kind") in ("ddp", "fsdp") or not has_lanes):
        yield Problem(
            "record",
            f"{job['record']}{told('record')} tells runs apart by their lanes, whose order of summation is not fixed "
            f"with this strategy{told('strategy')}",
            "Leave it out, or use strategy: ring or synchronous parameter-server.",
        )


def _cluster_fits(job: Job, told: Told) -> Iterator[Problem]:
    engine, strategy, device = job["engine"], job["strategy"], job["device"]
    given: dict[str, Any] = {"kind": engine} if isinstance(engine, str) else dict(engine)
    if given.get("kind") != "ray":
        return
    said = f"engine: ray{told('engine')}"
    if job["batch_size"] == AUTO:
        yield Problem(
            "batch_size",
            f"auto{told('batch_size')} is looked for on this machine, and {said} trains on others",
            "Write a number: `quorate plan` says what fits.",
        )
    for secret in secret_keys(given):
        path = f"engine.{secret}"
        yield Problem(
            path,
            f"there is a secret in it{told(path)}, and whoever sees the cluster or the run would read it",
            "Give it to the nodes by other means, in their own environment, pip.conf or netrc; Ray's own token is in "
            "RAY_AUTH_TOKEN.",
        )
    gpu = dict(given.get("per_worker") or {}).get("gpu")
    key = "engine.per_worker.gpu"
    if device == "cuda" and gpu == 0:
        text = f"workers without a GPU{told(key)} cannot compute on device: cuda{told('device')}"
        yield Problem(key, text, "Write gpu: 1, or leave it out.")
    if gpu and device == "cpu":
        text = f"{gpu:g}{told(key)} would be held for each worker and not used: device: cpu{told('device')}"
        yield Problem(key, text, "Leave gpu out, or write device: cuda.")
    if gpu and device == "auto" and (what := _on_cpus_alone(strategy)):
        text = f"{gpu:g}{told(key)} would be held for each worker and not used: {what} computes on the CPU"
        yield Problem(key, text, f"Leave gpu out, or {what.partition(':')[0]}.")


def _growth_has_room(job: Job, told: Told) -> Iterator[Problem]:
    engine, strategy, workers, least = job["engine"], job["strategy"], job["workers"], job["min_workers"]
    if isinstance(engine, str) or dict(engine).get("grow") is None:
        return
    key = "engine.grow"
    if workers == least:
        text = f"there is nothing to choose between min_workers {least} and workers {workers}{told('workers')}"
        yield Problem(key, text, "Use a smaller min_workers, more workers, or leave grow out.")
    given: dict[str, Any] = {"kind": strategy} if isinstance(strategy, str) else dict(strategy)
    if given.get("kind") == "fsdp":
        text = f"strategy: fsdp{told('strategy')} keeps its number of workers while it runs"
        yield Problem(key, text, "Leave grow out.")


def _places_take_copies(job: Job, told: Told) -> Iterator[Problem]:
    places: list[str] = list(dict(job["checkpoint"]).get("to", [OWN_PLACE]))
    key, said = "checkpoint.to", told("checkpoint.to")
    if places[:1] != [OWN_PLACE]:
        first = f"it begins with {_shown(places[0])}" if places else "it names no place"
        yield Problem(
            key,
            f"{first}{said}: a checkpoint is saved in the run's own folder, {OWN_PLACE}, before it is copied anywhere",
            f"Write {OWN_PLACE} first, and after it the places that get copies: [{OWN_PLACE}, s3://bucket/prefix].",
        )
    for place in [other for other in places[1:] if other != OWN_PLACE]:
        if has_secret(place):
            yield Problem(
                key,
                f"{_shown(place)}{said} has a password or a query in it, and the job is written down in the run",
                "Leave it out, and give it to the store's own library, in the environment or in its settings file.",
            )
            break
        if not _URL.fullmatch(place) and not PurePath(place).is_absolute():
            yield Problem(
                key,
                f"{_shown(place)}{said} is neither the absolute path of a folder nor a URL",
                f"After {OWN_PLACE}, write places such as /mnt/backup or s3://bucket/prefix.",
            )
            break
    bare = [place.rstrip("/") for place in places]
    if twice := [place for index, place in enumerate(bare) if place in bare[:index]]:
        yield Problem(key, f"{_shown(twice[0])}{said} stands there twice", "Name every place once.")


def _one_key(job: Job, told: Told) -> Iterator[Problem]:
    encrypt = dict(job["checkpoint"]).get("encrypt")
    given = [key for key in ("key_file", "key_env") if encrypt is not None and dict(encrypt).get(key) is not None]
    if encrypt is not None and len(given) != 1:
        said = "both key_file and key_env are given" if given else "neither key_file nor key_env is given"
        yield Problem(
            "checkpoint.encrypt",
            f"{said}{told('checkpoint.encrypt')}",
            "Give exactly one: key_file: /path/of/key (a file), or key_env: MY_KEY (an environment variable).",
        )


def _shown(place: str) -> str:
    # What a person has typed in the wrong place must not stand in a log.
    return f'"{shown_place(place)}"'


def _gangs_do_not_encrypt(job: Job, told: Told) -> Iterator[Problem]:
    strategy = job["strategy"]
    kind = strategy if isinstance(strategy, str) else dict(strategy).get("kind")
    if job["encrypt"] is True and kind in ("ddp", "fsdp"):
        yield Problem(
            "encrypt",
            f"true{told('encrypt')} cannot be kept by strategy: {kind}{told('strategy')}: its tensors travel by Gloo "
            "or NCCL, which do not encrypt",
            "Use strategy: ring, or write encrypt: auto and see to the network between the hosts yourself.",
        )


_RULES: dict[Callable[[Job, Told], Iterator[Problem]], frozenset[str]] = {
    _workers_fit_lanes: frozenset({"workers", "lanes", "strategy"}),
    _gangs_do_not_encrypt: frozenset({"encrypt", "strategy"}),
    _workers_fill_mesh: frozenset({"strategy", "workers", "lanes", "min_workers", "spares", "balance"}),
    _sharded_in_step: frozenset({"strategy", "last_batch", "on_bad_sample", "compile", "batch_size"}),
    _workers_take_turns: frozenset(
        {"strategy", "workers", "lanes", "min_workers", "balance", "last_batch", "on_bad_sample"}
    ),
    _fewest_workers_fit: frozenset({"min_workers", "workers", "lanes"}),
    _batch_feeds_lanes: frozenset({"batch_size", "lanes", "accumulate"}),
    _one_length: frozenset({"epochs", "steps"}),
    _schedule_is_whole: frozenset({"schedule"}),
    _early_stop_sees_evaluations: frozenset({"early_stop", "evaluate"}),
    _lineage_leads_here: frozenset({"lineage", "steps", "early_stop"}),
    _strategy_is_whole: frozenset({"strategy"}),
    _units_have_no_steps: frozenset({"strategy", "average", "balance"}),
    _device_fits_strategy: frozenset({"strategy", "device"}),
    _loss_scale_is_used: frozenset({"precision", "loss_scale", "strategy"}),
    _shrinking_is_agreed: frozenset({"strategy", "on_out_of_memory"}),
    _gradients_are_whole: frozenset({"check_gradients", "strategy"}),
    _lanes_are_recorded: frozenset({"record", "strategy"}),
    _cluster_fits: frozenset({"engine", "strategy", "device", "batch_size"}),
    _growth_has_room: frozenset({"engine", "strategy", "workers", "min_workers"}),
    _places_take_copies: frozenset({"checkpoint"}),
    _one_key: frozenset({"checkpoint"}),
}
"""Each with its keys: it can be judged only when all of them are valid by themselves."""


def broken_rules(job: Job, doubtful: Collection[str] = (), told: Told = lambda _: "") -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are wrong already."""
    return [
        replace(problem, keys=tuple(sorted(keys - {problem.path})))
        for rule, keys in _RULES.items()
        if keys.isdisjoint(doubtful)
        for problem in rule(job, told)
    ]
