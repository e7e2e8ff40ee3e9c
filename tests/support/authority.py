"""A certificate authority of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

AUTHORITY = """
[ca]
default_ca = here
[here]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = {names}
"""


class Authority:
    """A CA in a folder, made with the openssl program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "index").touch()
        (folder / "serial").write_text("01")
        self._openssl("req", "-x509", *self._new_key("ca"), "-out", "ca.crt", "-subj", "/CN=ca", "-days", "9")
        self.certificate = folder / "ca.crt"

    def sign(self, name: str, *, names: str, begin: str = "20200101000000Z", end: str) -> tuple[Path, Path]:
        """A certificate and its key."""
        (self._folder / "ca.cnf").write_text(AUTHORITY.format(names=names))
        self._openssl("req", *self._new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["ca", "-batch", "-notext", "-config", "ca.cnf", "-cert", "ca.crt", "-keyfile", "ca.key"]
        self._openssl(*signing, "-in", f"{name}.csr", "-out", f"{name}.crt", "-startdate", begin, "-enddate", end)
        return self._folder / f"{name}.crt", self._folder / f"{name}.key"

    @staticmethod
    def _new_key(name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True, timeout=60)
