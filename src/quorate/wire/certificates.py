"""Who may talk to a job's processes: a certificate authority of the job, and a certificate for each of them.

The supervisor mints the authority when the job begins, and its key never leaves the supervisor's memory. A certificate
and its key reach a worker in its assignment and the coordinator in its appointment. None of it is ever in a file.
"""

import datetime
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quorate.core.errors import RequestError
from quorate.core.generation import file_name_of
from quorate.core.installation import install_of

COORDINATOR = "coordinator"
SUPERVISOR = "supervisor"

DOMAIN = "quorate"
"""Names in certificates end so. An authority is one job's alone, so they need not name the job as well."""

LIFETIME = datetime.timedelta(days=400)
"""No job takes longer; those that are resumed have a new authority."""

SLACK = datetime.timedelta(days=1)
"""By so much may the clock of a host be behind that of the supervisor."""

_LONGEST_NAME = 64
"""Characters of a common name."""


@dataclass(frozen=True)
class Identity:
    """What a process proves itself by: its certificate and its key; and the authority that vouches for the others.

    `name` is worker-2, server-0, coordinator or supervisor. All else is PEM.
    """

    name: str
    certificate: str
    key: str = field(repr=False)
    authority: str = field(repr=False)

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, str] | None) -> "Identity | None":
        """The identity that was told; None where there was none."""
        return None if fields is None else cls(**fields)

    @property
    def secrets(self) -> list[str]:
        """What must not be written down: the key, without the lines around it, which every key has."""
        return self.key.splitlines()[1:-1]


class Authority:
    """Vouches for the processes of one job.

    ::

        authority = Authority.mint("digits-0001")
        Assignment(..., identity=authority.issue(2))
        appointment["identity"] = authority.issue(COORDINATOR).to_json()
    """

    def __init__(self, run: str, key: Any, certificate: Any) -> None:
        self._run = run
        self._key = key
        self._certificate = certificate
        self.certificate = _pem(certificate)

    @classmethod
    def mint(cls, run: str, lifetime: datetime.timedelta = LIFETIME) -> "Authority":
        """A new authority, for the job that trains in this run."""
        x509, _, ec = _cryptography()
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name_of(f"job {run}")
        builder = _builder(name, name, key.public_key(), *_validity(lifetime))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(run, key, _signed(builder, key))

    def issue(self, process: int | str, lifetime: datetime.timedelta | None = None) -> Identity:
        """The identity of a worker or a server, by its number, or of COORDINATOR or SUPERVISOR."""
        x509, serialization, ec = _cryptography()
        name = process if isinstance(process, str) else file_name_of(process)
        key = ec.generate_private_key(ec.SECP256R1())
        own = self._certificate
        validity = (own.not_valid_before_utc, own.not_valid_after_utc) if lifetime is None else _validity(lifetime)
        builder = _builder(_name_of(f"{name} of {self._run}"), own.subject, key.public_key(), *validity)
        names = [x509.DNSName(host_of(name)), x509.DNSName(f"*.{host_of(name)}")]
        alternatives = x509.SubjectAlternativeName(names)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(alternatives, critical=False)
        builder = builder.add_extension(identifier, critical=False)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        return Identity(name, _pem(_signed(builder, self._key)), secret, self.certificate)


def host_of(name: str) -> str:
    """What stands for the host in the certificate of a process: processes are told apart, not the hosts they run on."""
    return f"{name}.{DOMAIN}"


def process_in(host: str) -> str:
    """The process that such a host stands for; empty for what stands for any of its callers."""
    return "" if host.startswith("*.") else host.removesuffix(f".{DOMAIN}")


def in_words(name: str) -> str:
    """worker-2 as people know it: worker 2."""
    return name.replace("-", " ", 1)


def refuse_without_library() -> None:
    """Before anything is started: who encrypts needs the library that makes certificates."""
    _cryptography()


def _cryptography() -> tuple[Any, Any, Any]:
    """The library, which only those need who encrypt."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise RequestError(
            f"encrypted links (`encrypt`) need the package `cryptography`: {install_of('encryption')}. "
            "`encrypt: false` trains without."
        ) from None
    return x509, serialization, ec


def _name_of(text: str) -> Any:
    x509, _, _ = _cryptography()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:_LONGEST_NAME])])


def _validity(lifetime: datetime.timedelta) -> tuple[datetime.datetime, datetime.datetime]:
    now = datetime.datetime.now(datetime.UTC)
    return now - SLACK, now + lifetime


def _builder(subject: Any, issuer: Any, public_key: Any, begins: datetime.datetime, ends: datetime.datetime) -> Any:
    x509, _, _ = _cryptography()
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(secrets.randbits(127) + 1).not_valid_before(begins).not_valid_after(ends)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)


def _usage(*, signs_certificates: bool) -> Any:
    x509, _, _ = _cryptography()
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _pem(certificate: Any) -> str:
    _, serialization, _ = _cryptography()
    text: str = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return text
