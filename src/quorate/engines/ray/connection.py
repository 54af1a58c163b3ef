"""Connecting to a Ray cluster, with the code that its nodes are given. What would have Ray try for minutes without a
word (nobody there, TLS on one side only, a foreign certificate, a wrong token) is found out first, and told."""

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ray
import ray.exceptions
from ray._common.tls_utils import load_certs_from_env
from ray._private import services as ray_services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, create_package
from ray._raylet import AuthenticationTokenLoader
from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from quorate.core.addresses import split_address
from quorate.core.errors import RequestError
from quorate.engines.ray.node_code import NodeCode
from quorate.spec.options import RAY_CLIENT

log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.packing")
_quiet.setLevel(logging.ERROR)

KEY_OF_JOBS = "engine.address"
REACH = 5.0
"""Seconds within which a cluster takes a connection, and answers there."""
AUTH_MODE, HOME_TOKEN = "RAY_AUTH_MODE", "~/.ray/auth_token"
USE_TLS, AUTHORITY, CERTIFICATE, KEY = "RAY_USE_TLS", "RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"


def connect(address: str, run_name: str, code: NodeCode, key: str = KEY_OF_JOBS) -> None:
    """Connect this process, once; raises RequestError with what to do about it. `key` is where the address was
    written."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    _refuse_unreachable(address, key)
    # Inside of a job of Ray's, what this one says comes first.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    with tempfile.TemporaryDirectory(prefix="quorate-code-") as scratch:
        init(address, run_name, key, runtime_env=code.runtime_env(packed(code, Path(scratch))) or None)


def init(address: str, name: str, key: str = KEY_OF_JOBS, **options: Any) -> None:
    """Have Ray connect, or start on this machine, without a word of its own; raises RequestError. `key` is where the
    address was written."""
    try:
        if address == "local":
            _take_own_token()
        # Not the command line, which may have secrets: Ray shows that to all who may look at its jobs.
        with replaced(ray_utils, "get_entrypoint_name", lambda: f"quorate ({name})"), _keeping_sigterm():
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options
            )
    except Exception as error:  # whatever comes: of a node that does not start, Ray raises nothing more special
        raise _not_connected(address, first_line(error), key=key) from None
    # Ray would print what happens to nodes on standard output, which is for the job's result.
    ray_worker.print_to_stdstream = _log_lines
    warn_without_token()


def _refuse_unreachable(address: str, key: str) -> None:
    """Raise where nobody takes a connection at an address as job files have it, the two sides do not agree on TLS, or
    the cluster asks for a token that this process does not show. An address that is not known without Ray is left to
    it."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith(RAY_CLIENT):
        otherwise = "; or submit the job to it with --detach" if key == KEY_OF_JOBS else ""
        raise RequestError(
            f"{key}: {named} is a server of Ray Client, which does not say what is free on which node: "
            "workers cannot be placed from there. Name the cluster by its host:port (6379 unless another was chosen), "
            f"on a machine that reaches all of its nodes{otherwise}."
        )
    try:
        place = None if address == "local" else ray_services.canonicalize_bootstrap_address(address)
    except Exception:  # there is none: what Ray says then, it says at once
        return
    if place is None:
        return
    try:
        socket.create_connection(split_address(place), REACH).close()
    except OSError as error:
        raise _not_connected(address, str(error), key=key) from None
    refusal = _refusal_at(place, None)
    if refusal is not None and refusal.code() is grpc.StatusCode.UNAVAILABLE:
        here = "is set here" if _uses_tls() else "is not set here"
        hint = (
            f" {USE_TLS} {here}, and has to be as on the nodes of the cluster; with it {AUTHORITY}, {CERTIFICATE} and "
            f"{KEY} name certificates of the cluster's own authority."
        )
        raise _not_connected(address, f"it answers, but not to this process: {refusal.details()}", hint, key)
    if (
        refusal is not None
        and refusal.code() is grpc.StatusCode.UNAUTHENTICATED
        and (why := _token_trouble(address, place))
    ):
        raise RequestError(
            f"{key}: the Ray cluster {_where(address)} asks for a token: {why}. `ray get-auth-token` prints it "
            "on the cluster's head; here, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to it."
        )


def warn_without_token() -> None:
    """Warn where the cluster that this process is connected to lets everybody in."""
    place = str(ray.get_runtime_context().gcs_address)
    if _refusal_at(place, None) is None:
        log.warning(
            "the Ray cluster at %s asks for no token: whoever reaches its ports can run code on its machines. Make a "
            "token with `ray get-auth-token --generate`, and start Ray with RAY_AUTH_MODE=token and the same "
            "RAY_AUTH_TOKEN on all of them.",
            place,
        )


def _token_trouble(address: str, place: str) -> str:
    """What is wrong with the token that this process would show to a cluster that asks for one, if anything is."""
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    if not loader.has_token(ignore_auth_mode=True):
        return f"RAY_AUTH_TOKEN is not set here, nor is there {HOME_TOKEN}"
    named = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]
    token = f"{named[0]} is set here" if named else f"{HOME_TOKEN} is there"
    # Ray shows a token unasked only to a cluster that it has found on this machine by itself.
    is_found = address == "auto" and not os.environ.get("RAY_ADDRESS") and os.environ.get(AUTH_MODE) is None
    if not is_found and not is_token_auth_enabled():
        return f"{token}, and not used, since RAY_AUTH_MODE is {os.environ.get(AUTH_MODE, 'not set')}"
    refusal = _refusal_at(place, loader.get_raw_token(ignore_auth_mode=True))
    is_wrong = refusal is not None and refusal.code() is grpc.StatusCode.UNAUTHENTICATED
    return f"{token}, and has to be the cluster's own" if is_wrong else ""


def _refusal_at(place: str, token: str | None) -> Any:
    """What a cluster answers one who shows this token, or none, if it does not let that in. Raises RequestError where
    certificates are missing. (Ray's own `init_grpc_channel` would show the token of this process unasked.)"""
    if _uses_tls():
        try:
            certificate, key, authority = load_certs_from_env()
        except (RuntimeError, OSError) as error:
            raise RequestError(
                f"{USE_TLS} is set here, and {AUTHORITY}, {CERTIFICATE} or {KEY} cannot be read ({error})."
            ) from None
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        channel = grpc.secure_channel(place, credentials, GLOBAL_GRPC_OPTIONS)
    else:
        channel = grpc.insecure_channel(place, GLOBAL_GRPC_OPTIONS)
    shown = [("authorization", f"Bearer {token}")] if token else None
    with channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=REACH, metadata=shown)
        except grpc.RpcError as error:
            return error
    return None


def _take_own_token() -> None:
    """Have a token for what this process starts, in its environment. Without one Ray would write one to the user's
    home, for all to read, and every Ray that is started there would ask for it from then on."""
    loader = AuthenticationTokenLoader.instance()
    is_asked = os.environ.get(AUTH_MODE, "token").lower() == "token"
    if is_asked and not loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        loader.reset_cache()


def _uses_tls() -> bool:
    return os.environ.get(USE_TLS, "0").lower() in ("1", "true")


def packed(code: NodeCode, scratch: Path) -> str | None:
    """The folder that travels, as a file in `scratch`; None where there is none."""
    if code.root is None or code.is_sent:
        return None
    file = scratch / "code.zip"
    try:
        create_package(str(code.root), file, include_gitignore=True, excludes=list(code.excludes), logger=_quiet)
    except OSError as error:
        raise RequestError(f"engine.runtime_env: {code.root} cannot be sent to the nodes ({error}).") from None
    size = file.stat().st_size
    if size >= GCS_STORAGE_MAX_SIZE:
        raise RequestError(
            f"engine.runtime_env: the folder {code.root} is sent to the nodes, and has {size / 2**20:,.0f} MiB when it "
            f"is packed; Ray takes {GCS_STORAGE_MAX_SIZE / 2**20:,.0f} MiB. Leave out what they do not need, such as "
            "data: engine: {runtime_env: {excludes: [data/]}}, or by a .gitignore there."
        )
    return str(file)


@contextlib.contextmanager
def replaced(module: Any, name: str, other: Any) -> Iterator[None]:
    """Have a module of Ray's call something else, where Ray has no setting for it."""
    before = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Ray's library takes the signal for itself: it would print a stack, and end the process 3 s later whoever else
    listens. That is too short for a save. (By the C library, since Python lets its main thread alone change this.)"""
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(1024)  # larger than a struct sigaction anywhere, and never looked into
    libc.sigaction(int(signal.SIGTERM), None, before)
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGTERM), before, None)


def _log_lines(told: dict[str, Any], **_: Any) -> None:
    for line in told["lines"]:
        log.info("Ray: %s", line)


def _where(address: str) -> str:
    return "on this machine or at RAY_ADDRESS" if address == "auto" else f"at {address}"


def _not_connected(address: str, reason: str, hint: str = "", key: str = KEY_OF_JOBS) -> RequestError:
    if address == "local":
        return RequestError(f"{key}: Ray cannot be started on this machine ({reason}).{hint}")
    here = "train on this machine with `engine: local`" if key == KEY_OF_JOBS else "have one started here by `local`"
    return RequestError(
        f"{key}: there is no Ray cluster {_where(address)} ({reason}). Start one with `ray start --head`, "
        f"say where it is with `{key}`, or {here}.{hint}"
    )


def first_line(error: Exception) -> str:
    """What an error of Ray says, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    died = next((line for line in lines if line.startswith("The actor died because")), None)
    return (died or (lines or [type(error).__name__])[0]).rstrip(".")
