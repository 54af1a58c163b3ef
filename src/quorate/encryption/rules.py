"""What must hold between the keys of encrypted checkpoints."""

from collections.abc import Iterator

from quorate.core.errors import Problem
from quorate.encryption.option import EncryptSpec
from quorate.spec.job import JobSpec
from quorate.spec.options import Rules, Said


def _one_key(job: JobSpec, said: Said) -> Iterator[Problem]:
    encrypt = job.checkpoint.sealing
    if isinstance(encrypt, EncryptSpec) and (encrypt.key_file is None) == (encrypt.key_env is None):
        text = (
            "neither key_file nor key_env is given"
            if encrypt.key_file is None
            else "both key_file and key_env are given"
        )
        yield Problem(
            "checkpoint.encrypt",
            f"{text}{said('checkpoint.encrypt')}",
            "Give exactly one: key_file: /path/of/key (a file), or key_env: MY_KEY (an environment variable).",
        )


RULES: Rules = {_one_key: frozenset({"checkpoint"})}
