"""`python -m benchmarks`: one verb for each benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.main import run as run_command
from quorate.cli.options import Json, group_of_verbs

Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="How often everything is measured, in turns.")]
Systems = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Measure only these, with commas between.", show_default=False)
]
Peers = Annotated[
    Path | None,
    typer.Option(
        metavar="PYTHON",
        help="The Python that has the peers; .venv-bench beside ours, or our own, if not given.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the JSON document to this file.", show_default=False),
]

app = group_of_verbs("python -m benchmarks", "BENCHMARK ...")


@app.callback()
def benchmarks() -> None:
    """Measure Quorate and its peers side by side.

    Everything is measured in turns, round after round, so that noise hits all alike. A peer that is not installed is
    reported as not measured. Nothing is written anywhere unless --output is given.

    \b
    Examples:
      python -m benchmarks allreduce --processes 2 --sizes 1MB,25MB
      python -m benchmarks step
      python -m benchmarks startup --json
      python -m benchmarks scaling --workers 1,2
      python -m benchmarks ddp
      python -m benchmarks overlap
      python -m benchmarks compress
      python -m benchmarks links
      python -m benchmarks servers
      python -m benchmarks checkpoint --size 100MB
      python -m benchmarks sharded
      python -m benchmarks data --size 500MB
      python -m benchmarks tracking
      python -m benchmarks looking
      python -m benchmarks gpu resnet50,lanes
      python -m benchmarks ray start
      python -m benchmarks tune many
    """


@app.command()
def allreduce(
    processes: Annotated[str, typer.Option(metavar="N,N", help="Numbers of processes.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,SIZE", help="Sizes of the gradient; a KB has 1024 bytes.")
    ] = "1KB,64KB,1MB,25MB,100MB",
    repeats: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Exchanges of each size in a round.", show_default="by size, 8 to 200"),
    ] = None,
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Sum gradients among processes of this machine.

    One gradient of float32 values in each process, until their sum is readable in each. Systems: quorate-shm,
    quorate-tcp, gloo, openmpi.

    \b
    Examples:
      python -m benchmarks allreduce
      python -m benchmarks allreduce --processes 2 --sizes 1MB,25MB
      python -m benchmarks allreduce --systems quorate-shm,gloo --output sums.json
    """
    from benchmarks.allreduce import SYSTEMS, AllReduce, check_processes
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_counts, parse_sizes

    counts = check_processes(parse_counts(processes, "--processes"))
    bench = AllReduce(counts, parse_sizes(sizes), choose_systems(systems, SYSTEMS), repeats)
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def nccl(
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,SIZE", help="Sizes of the tensors; a KB has 1024 bytes.")
    ] = "1MB,25MB,100MB",
    repeats: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Exchanges of each size in a round.", show_default=False)
    ] = None,
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure NCCL's collectives by size, beside Gloo's and our all-reduce.

    A process for each GPU; with one GPU a call of NCCL is measured, and with none Gloo alone. 4 B is the latency; `of a
    step` is an all-reduce beside a forward and backward pass of linear layers whose gradient has that size. Systems:
    quorate-shm, gloo, nccl.

    \b
    Examples:
      python -m benchmarks nccl
      python -m benchmarks nccl --sizes 1MB,400MB --systems nccl --output nccl.json
    """
    from benchmarks.nccl import SYSTEMS, Nccl
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_sizes

    bench = Nccl.here(parse_sizes(sizes), choose_systems(systems, SYSTEMS), repeats)
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def step(
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train a tiny MLP and a small CNN, and compare the loops.

    One process, one thread, the same data and optimizer; the time of a step in steady state. Systems: quorate,
    quorate-own-loop, hand-written, hand-tuned (the same with our
    allocator's settings), fabric, accelerate, lightning.

    \b
    Examples:
      python -m benchmarks step
      python -m benchmarks step --systems quorate,hand-written --rounds 9
      python -m benchmarks step --systems quorate,quorate-own-loop --rounds 9
    """
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems
    from benchmarks.step import SYSTEMS, Step

    raise typer.Exit(run(Step(choose_systems(systems, SYSTEMS)), Options(rounds, peers, output, as_json)))


@app.command()
def tracking(rounds: Rounds = 3, output: Output = None, as_json: Json = False) -> None:
    """Train a tiny MLP and a CNN on one worker, with every sink on and with none.

    It needs the libraries of all of them, which the environment of `make test-services` has.

    \b
    Examples:
      python -m benchmarks tracking
      python -m benchmarks tracking --rounds 1
    """
    from benchmarks.run import Options, run
    from benchmarks.tracking import Tracking

    raise typer.Exit(run(Tracking(), Options(rounds, None, output, as_json)))


@app.command()
def audits(rounds: Rounds = 5, output: Output = None, as_json: Json = False) -> None:
    """Train a CNN on one and on two workers, with and without audits and recorded digests.

    \b
    Examples:
      python -m benchmarks audits
      python -m benchmarks audits --rounds 9 --output audits.json
    """
    from benchmarks.audits import Audits
    from benchmarks.run import Options, run

    raise typer.Exit(run(Audits(), Options(rounds, None, output, as_json)))


@app.command()
def startup(
    systems: Systems = None,
    rounds: Rounds = 5,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the way from the command to the first complete step.

    A tiny MLP on 2 workers, against a plain script that imports torch and takes a step, and torchrun with 2 processes.
    Systems: quorate, quorate-warm (a run after others in one program), plain-python, torchrun; and what starts no job:
    quorate-help (`quorate --help`), quorate-import (`import quorate`).

    \b
    Examples:
      python -m benchmarks startup
      python -m benchmarks startup --systems quorate,plain-python
    """
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems
    from benchmarks.startup import SYSTEMS, Startup

    raise typer.Exit(run(Startup(choose_systems(systems, SYSTEMS)), Options(rounds, peers, output, as_json)))


@app.command()
def scaling(
    workers: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of workers; 4x2 is 4 workers of 2 threads each.")
    ] = "1,2,4,8",
    lanes: Annotated[int, typer.Option(metavar="N", min=1, help="Lanes; a lane takes 32 samples of each batch.")] = 8,
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train a small CNN on more and more workers.

    The global batch is always the same. Efficiency is against one worker; no-exchange are the same processes, each
    for itself: the most that the machine can do. Systems: quorate, ddp-gloo, no-exchange.

    \b
    Examples:
      python -m benchmarks scaling
      python -m benchmarks scaling --workers 1,2 --lanes 4
      python -m benchmarks scaling --workers 2,4x2 --systems quorate
    """
    from benchmarks.run import Options, run
    from benchmarks.scaling import SYSTEMS, Scaling
    from benchmarks.selection import choose_systems, parse_crowds

    bench = Scaling(parse_crowds(workers, "--workers"), lanes, choose_systems(systems, SYSTEMS))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def overlap(
    rounds: Rounds = 3,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train over a slow network, with and without overlap.

    Two workers in network namespaces of their own, joined at 200 Mbit/s, and a model whose exchange takes about as long
    as its backward pass. Needs root, ip and tc. Systems: quorate, quorate-no-overlap.

    \b
    Examples:
      python -m benchmarks overlap
      python -m benchmarks overlap --rounds 9 --output overlap.json
    """
    from benchmarks.overlap import Overlap
    from benchmarks.run import Options, run

    raise typer.Exit(run(Overlap(), Options(rounds, output=output, as_json=as_json)))


@app.command()
def compress(
    rounds: Rounds = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train with a hundredth of each gradient, and with all of it.

    Digits by plain SGD with several seeds, and a step of two workers in network namespaces of their own, joined at 100
    Mbit/s. Needs root, ip and tc, and scikit-learn. Systems: quorate-dense, quorate-top-k, quorate-no-feedback.

    \b
    Examples:
      python -m benchmarks compress
      python -m benchmarks compress --rounds 3 --output compress.json
    """
    from benchmarks.compress import Compress
    from benchmarks.run import Options, run

    raise typer.Exit(run(Compress(), Options(rounds, output=output, as_json=as_json)))


@app.command()
def links(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the frame; a MB has 1024 KB.")] = "25MB",
    rounds: Rounds = 3,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Send a frame from one host to another, encrypted and plain.

    Two workers in network namespaces of their own, joined at 1 Gbit/s. Needs root, ip and tc, and the extra encryption.
    Systems: tls, plain.

    \b
    Examples:
      python -m benchmarks links
      python -m benchmarks links --size 1MB --rounds 9 --output links.json
    """
    from benchmarks.links import Links
    from benchmarks.run import Options, run
    from benchmarks.size import parse_size

    raise typer.Exit(run(Links(parse_size(size, "--size")), Options(rounds, output=output, as_json=as_json)))


@app.command()
def servers(
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,SIZE", help="Sizes of the gradient; a KB has 1024 bytes.")
    ] = "1MB,25MB",
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure parameter servers.

    A gradient to a server and new values back, against a stream of gRPC and the all-reduce of two workers; a job with a
    slow worker, in each mode; a job whose members are killed; a large table with sparse gradients. Systems:
    quorate-shm, quorate-tcp, quorate-ring, grpc, quorate-synchronous, quorate-bounded, quorate-asynchronous,
    quorate-killed, quorate-sparse, quorate-dense.

    \b
    Examples:
      python -m benchmarks servers
      python -m benchmarks servers --systems quorate-shm,quorate-ring,grpc --sizes 25MB --rounds 9
      python -m benchmarks servers --systems quorate-synchronous,quorate-bounded,quorate-asynchronous
    """
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_sizes
    from benchmarks.servers import SYSTEMS, Servers

    bench = Servers(parse_sizes(sizes), choose_systems(systems, SYSTEMS))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def recovery(
    workers: Annotated[str, typer.Option(metavar="N,N", help="Numbers of workers.")] = "2,3,4",
    systems: Systems = None,
    rounds: Rounds = 1,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Kill workers, and time how soon the others go on.

    Steps of 50 ms; a worker is killed at a moment anywhere in a step. torchrun restarts all from what was saved after
    the last step. Systems: quorate, torchrun.

    \b
    Examples:
      python -m benchmarks recovery
      python -m benchmarks recovery --workers 3 --systems quorate --rounds 3
    """
    from benchmarks.recovery import SYSTEMS, Recovery
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_crowds

    processes = tuple(crowd.processes for crowd in parse_crowds(workers, "--workers"))
    bench = Recovery(processes, choose_systems(systems, SYSTEMS))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def ddp(
    systems: Systems = None,
    rounds: Rounds = 3,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train with `strategy: ddp` and with DistributedDataParallel, and kill workers of both.

    The step of a small CNN on two processes, and the time from `kill -9` of a worker to the next step, beside torchrun.
    Systems: quorate, ddp-gloo, quorate-ddp, torchrun.

    \b
    Examples:
      python -m benchmarks ddp
      python -m benchmarks ddp --systems quorate,ddp-gloo --rounds 9
    """
    from benchmarks.ddp import SYSTEMS, Ddp
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems

    raise typer.Exit(run(Ddp(choose_systems(systems, SYSTEMS)), Options(rounds, peers, output, as_json)))


@app.command()
def changes(
    rounds: Rounds = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Resize a running job, and ask its workers to leave.

    From 2 workers to 4, 1 and 3, then a SIGTERM to each, while a lane takes 100 ms: the longest pause between two
    steps, beyond the usual ones before and after the change. Only Quorate can, so there is no peer.

    \b
    Examples:
      python -m benchmarks changes
      python -m benchmarks changes --rounds 3 --output changes.json
    """
    from benchmarks.changes import Changes
    from benchmarks.run import Options, run

    raise typer.Exit(run(Changes(), Options(rounds, output=output, as_json=as_json)))


@app.command()
def checkpoint(
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Weights and optimizer together; a MB has 1024 KB.")
    ] = "500MB",
    saves: Annotated[int, typer.Option(metavar="N", min=1, help="Saves in each training that count.")] = 4,
    systems: Systems = None,
    rounds: Rounds = 1,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Save a large state while training, and load it.

    What a save adds to training, how soon it is safe, what memory it takes and how long loading takes, against raw
    writes and reads of the same disk. Systems: quorate, torch-save, dcp, dcp-async, dcp-async-stager, safetensors.

    \b
    Examples:
      python -m benchmarks checkpoint
      python -m benchmarks checkpoint --size 100MB --systems quorate,dcp-async-stager
      python -m benchmarks checkpoint --rounds 3 --output saves.json
    """
    from tempfile import gettempdir

    from benchmarks.checkpoint import SYSTEMS, Checkpoint, disk_needed
    from benchmarks.disk import check_disk
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems
    from benchmarks.size import parse_size

    bench = Checkpoint(parse_size(size, "--size"), saves, choose_systems(systems, SYSTEMS))
    check_disk(Path(gettempdir()), disk_needed(bench.size, bench.saves))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def sharded(
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Weights and optimizer together; a GB has 1024 MB.")
    ] = "1GB",
    saves: Annotated[int, typer.Option(metavar="N", min=1, help="Saves in each training that count.")] = 4,
    systems: Systems = None,
    rounds: Rounds = 1,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Save a state of which two workers hold a half each.

    With `strategy: fsdp`, and with FSDP2 and DCP's asynchronous stager: what training waits for a save. Systems:
    quorate-fsdp, dcp-async-stager.

    \b
    Examples:
      python -m benchmarks sharded
      python -m benchmarks sharded --size 100MB --rounds 3
    """
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems
    from benchmarks.sharded import SYSTEMS, Sharded
    from benchmarks.size import parse_size

    bench = Sharded(parse_size(size, "--size"), saves, choose_systems(systems, SYSTEMS))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def data(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Data of each kind; a GB has 1024 MB.")] = "10GB",
    loaders: Annotated[str, typer.Option(metavar="N,N", help="Numbers of loader processes.")] = "0,1",
    fashion: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where Fashion-MNIST is; data/fashion-mnist beside the examples, if not given.",
            show_default=False,
        ),
    ] = None,
    systems: Systems = None,
    rounds: Rounds = 1,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Read data that need not fit into memory.

    Parquet and tar shards, by a job whose steps do next to nothing: its speed against the same library alone and
    torch's DataLoader, its memory, its speed from a distant store, and what examples wait. Systems: quorate,
    raw-decode, dataloader, quorate-store.

    \b
    Examples:
      python -m benchmarks data
      python -m benchmarks data --size 500MB --systems quorate,raw-decode
      python -m benchmarks data --size 1GB --loaders 0 --output data.json
    """
    from tempfile import gettempdir

    from benchmarks.data import SYSTEMS, Data, check_packages, disk_needed, find_examples
    from benchmarks.disk import check_disk
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_counts
    from benchmarks.size import parse_size

    check_packages()
    numbers = parse_counts(loaders, "--loaders", least=0)
    bench = Data(parse_size(size, "--size"), numbers, choose_systems(systems, SYSTEMS), find_examples(fashion))
    check_disk(Path(gettempdir()), disk_needed(bench.size))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


@app.command()
def looking(
    steps: Annotated[int, typer.Option(metavar="N", min=1000, help="Steps of the run that is looked at.")] = 1_000_000,
    rounds: Rounds = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Look at a run of very many steps: show, runs, report and top, each with the memory that it takes.

    The run is written for that, as a job would have left it; a million steps take 350 MB of disk and a few minutes.

    \b
    Examples:
      python -m benchmarks looking
      python -m benchmarks looking --steps 100000 --rounds 3
    """
    from benchmarks.looking import Looking
    from benchmarks.run import Options, run

    raise typer.Exit(run(Looking(steps), Options(rounds, None, output, as_json)))


@app.command()
def ray(
    rows: Annotated[
        str | None, typer.Argument(metavar="ROWS", help="Measure only these, with commas between.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=4, help="Workers of the row crowd.")] = 64,
    rounds: Rounds = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train on a Ray cluster whose nodes are all on this machine.

    Rows: start, from the command to the first step, beside a local job and Ray Train; nodes, one killed and one added;
    crowd, very many workers; metrics, steps whose metrics are written as they come. Needs the extra ray. Systems:
    quorate-ray, quorate-local, quorate-ray-tracked, ray-train.

    \b
    Examples:
      python -m benchmarks ray
      python -m benchmarks ray start,nodes --rounds 3 --output ray.json
      python -m benchmarks ray crowd --workers 16
    """
    from importlib.util import find_spec

    from benchmarks.on_ray import ROWS, OnRay
    from benchmarks.run import Options, run
    from benchmarks.selection import parse_names
    from quorate.core.errors import RequestError

    wanted = list(ROWS) if rows is None else parse_names(rows, list(ROWS), "ROWS")
    if find_spec("ray") is None:
        raise RequestError("Ray is not installed: pip install 'quorate[ray]'")
    raise typer.Exit(run(OnRay(wanted, workers), Options(rounds, output=output, as_json=as_json)))


@app.command()
def tune(
    rows: Annotated[
        str | None, typer.Argument(metavar="ROWS", help="Measure only these, with commas between.", show_default=False)
    ] = None,
    trials: Annotated[int, typer.Option(metavar="N", min=2, help="Trials of the row many.")] = 200,
    concurrent: Annotated[int, typer.Option(metavar="N", min=1, help="How many of them run at a time.")] = 10,
    rounds: Rounds = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Search for hyperparameters on a Ray cluster of this machine.

    Rows: long, trials of half a minute, whose training is all that should take time; many, tiny ones; asha and
    fashion, the steps that ASHA saves on digits and Fashion-MNIST and what it loses; pbt, populations against random
    trials by five seeds. fashion needs the data of scripts/datasets.py. Needs the extra tune. System: quorate-tune.

    \b
    Examples:
      python -m benchmarks tune
      python -m benchmarks tune many --trials 50 --concurrent 5
    """
    from importlib.util import find_spec

    from benchmarks.run import Options, run
    from benchmarks.selection import parse_names
    from benchmarks.tune import ROWS, Tune
    from quorate.core.errors import RequestError

    wanted = list(ROWS) if rows is None else parse_names(rows, list(ROWS), "ROWS")
    if find_spec("ray") is None:
        raise RequestError("Ray is not installed: pip install 'quorate[tune]'")
    raise typer.Exit(run(Tune(wanted, trials, concurrent), Options(rounds, output=output, as_json=as_json)))


@app.command()
def gpu(
    rows: Annotated[
        str | None, typer.Argument(metavar="ROWS", help="Measure only these, with commas between.", show_default=False)
    ] = None,
    keep: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where runs, data and compiled kernels are kept.")
    ] = Path("bench-gpu"),
    loaders: Annotated[int, typer.Option(metavar="N", min=0, help="Loader processes of each job and loop.")] = 8,
    steps: Annotated[
        int, typer.Option(metavar="N", min=10, help="Steps that are timed, after a quarter as many.")
    ] = 240,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny models and few steps on the CPU: whether every row runs.")
    ] = False,
    systems: Systems = None,
    rounds: Rounds = 2,
    peers: Peers = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train the models of examples/models on one GPU, and compare with loops that were tuned by hand.

    Rows: resnet50, lanes, transformers, gangs, planned, digests, recovery, exchange, busy, checkpoint, memory, cifar.
    Systems: quorate, quorate-free, quorate-ddp, hand-compiled, hand-captured, hand-ddp, lightning-by-hand, lightning,
    accelerate. With --output, the file is written after every measurement.

    \b
    Examples:
      python -m benchmarks gpu resnet50,lanes --output resnet50.json
      python -m benchmarks gpu digests --rounds 1
      python -m benchmarks gpu transformers --systems quorate,hand-captured
      python -m benchmarks gpu --smoke
    """
    from benchmarks.gpu import ROWS, SMOKE, SYSTEMS, Gpu, Lengths
    from benchmarks.run import Options, run
    from benchmarks.selection import choose_systems, parse_names
    from quorate.core.errors import RequestError
    from quorate.core.gpus import gpus_here

    wanted = list(ROWS) if rows is None else parse_names(rows, list(ROWS), "ROWS")
    if not smoke and not gpus_here():
        raise RequestError("This machine has no GPU. --smoke runs the same rows with tiny models on the CPU.")
    loaders, lengths = (min(loaders, 1), SMOKE) if smoke else (loaders, Lengths(steps // 4, steps))
    bench = Gpu(wanted, keep, smoke, loaders, lengths, choose_systems(systems, SYSTEMS))
    raise typer.Exit(run(bench, Options(rounds, peers, output, as_json)))


if __name__ == "__main__":
    run_command(lambda: app)
