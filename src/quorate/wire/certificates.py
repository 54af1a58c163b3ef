"""Who may talk to the processes of a job that encrypts: an authority of the job, and a certificate for each of them.

The supervisor mints the authority when the job begins, and its key never leaves the supervisor's memory. A certificate
and its key reach a worker in its assignment and the coordinator in its appointment. None of it is ever in a file.
"""

import datetime
import secrets
from typing import Any

from quorate.core.errors import RequestError
from quorate.core.generation import file_name_of
from quorate.core.installation import install_of
from quorate.wire.handshake import Identity, host_of

LIFETIME = datetime.timedelta(days=400)
"""No job takes longer; those that are resumed have a new authority."""

SLACK = datetime.timedelta(days=1)
"""By so much may the clock of a host be behind that of the supervisor."""

_LONGEST_NAME = 64
"""Characters of a common name."""


class Authority:
    """Vouches for the processes of one job: that which trains in this run.

    ::

        authority = Authority("digits-0001")
        Assignment(..., identity=authority.issue(2))
        appointment["identity"] = asdict(authority.issue(COORDINATOR))
    """

    def __init__(self, run: str) -> None:
        ec, x509 = _cryptography()
        self._run = run
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name_of(f"job {run}")
        alone = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._certify(self._name, self._key, LIFETIME, alone)

    def issue(self, process: int | str, lifetime: datetime.timedelta = LIFETIME) -> Identity:
        """The identity of a worker or a server, by its number, or of COORDINATOR or SUPERVISOR."""
        from cryptography.hazmat.primitives import serialization as form

        ec, x509 = _cryptography()
        name = process if isinstance(process, str) else file_name_of(process)
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(host_of(name)), x509.DNSName(f"*.{host_of(name)}")])
        no_authority = x509.BasicConstraints(ca=False, path_length=None)
        certificate = self._certify(_name_of(f"{name} of {self._run}"), key, lifetime, no_authority, names)
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        return Identity(name, certificate, private.decode(), self.certificate)

    def _certify(self, subject: Any, key: Any, lifetime: datetime.timedelta, constraints: Any, *more: Any) -> str:
        from cryptography.hazmat.primitives import hashes, serialization

        _, x509 = _cryptography()
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), secrets.randbits(127) + 1)
        builder = builder.not_valid_before(now - SLACK).not_valid_after(now + lifetime)
        builder = builder.add_extension(constraints, critical=True)
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        text: str = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
        return text


def refuse_without_library() -> None:
    """Before anything is started: who encrypts needs the library that makes certificates."""
    _cryptography()


def _cryptography() -> tuple[Any, Any]:
    """The library, which only those need who encrypt."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise RequestError(
            f"encrypted links (`encrypt`) need the package `cryptography`: {install_of('encryption')}. "
            "`encrypt: false` trains without."
        ) from None
    return ec, x509


def _name_of(text: str) -> Any:
    _, x509 = _cryptography()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:_LONGEST_NAME])])
