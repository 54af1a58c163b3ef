"""What jobs and searches say alike of a cluster: its address, a shared folder, and what each worker gets."""

from pathlib import PurePath
from typing import Annotated

from pydantic import Field

from quorate.core.addresses import has_secret, is_url, shown_place, split_address
from quorate.spec.keys import Allowed
from quorate.spec.section import Section

RAY_CLIENT = "ray://"


def checked_address(address: str) -> str:
    """The address of a cluster. Raises ValueError that says what to write instead."""
    if address in ("auto", "local"):
        return address
    if has_secret(address):
        return address  # which a rule refuses, without showing it
    protocol, separator, rest = address.rpartition("://")
    if separator and f"{protocol}{separator}" != RAY_CLIENT:
        raise ValueError(f"Ray's own protocol is {RAY_CLIENT}: write {RAY_CLIENT}{rest}, or {rest} alone.")
    host, colon, _ = rest.rpartition(":")
    if not colon:
        port = 10001 if separator else 6379
        raise ValueError(f"Add the port, {port} where nothing else was chosen: {address}:{port}.")
    if not 0 < split_address(rest)[1] < 65536:
        raise ValueError(f"A port is from 1 to 65535: {host}:6379.")
    return address


def checked_folder(folder: str | None) -> str | None:
    """A folder that several hosts reach. Raises ValueError that says what to write instead."""
    if folder is None:
        return None
    if is_url(folder):
        raise ValueError(f"It is a folder that all hosts have mounted, and {shown_place(folder)} is none.")
    if not PurePath(folder).is_absolute():
        raise ValueError("It has to be the same on all hosts: write an absolute path, such as /mnt/shared.")
    return folder


class PerWorkerSpec(Section):
    """What Ray reserves for each worker. Null: as many CPUs as a lane has threads, and a GPU if `device: cuda`."""

    cpu: Annotated[float | None, Field(gt=0), Allowed("a number above 0, or null: as many as `threads`")] = None
    """CPUs for each worker."""
    gpu: Annotated[
        float | None,
        Field(ge=0, le=1),
        Allowed("a number from 0 to 1 (several workers may share a GPU), or null: 1 with device: cuda, else 0"),
    ] = None
    """A GPU for each worker, or a fraction of one."""
