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
