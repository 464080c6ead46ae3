"""ArangoDB by TLS: the certificate is always checked."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreRefused, StoreUnavailable
from tests.arango_standin.running import Server, run_standin
from tests.support.places import ArangoOpener


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``here.pem`` for 127.0.0.1, ``there.pem`` for another address, each with its key."""
    directory = tmp_path_factory.mktemp("certificates")
    for name, address in (("here", "127.0.0.1"), ("there", "192.0.2.1")):
        file = str(directory / f"{name}.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
        command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"]
        command += ["-addext", f"subjectAltName=IP:{address}"]
        key = f"{file}.key"
        subprocess.run([*command, "-keyout", key, "-out", file], check=True, capture_output=True)
        Path(f"{file}.both").write_text(Path(file).read_text() + Path(key).read_text())
    return directory


@pytest.fixture(scope="module")
def secured(certificates: Path) -> Iterator[Server]:
    with run_standin("--certificate", str(certificates / "here.pem.both")) as server:
        yield server


def test_the_right_authority(
    secured: Server, certificates: Path, open_arango: ArangoOpener
) -> None:
    store = open_arango(secured, tls=True, ca_file=str(certificates / "here.pem"))
    key = uuid.uuid4().hex
    store.insert("meta", {"_key": key})
    assert store.get("meta", key) is not None


def test_a_wrong_authority_or_none(
    secured: Server, certificates: Path, open_arango: ArangoOpener
) -> None:
    for ca_file in (str(certificates / "there.pem"), None):
        with pytest.raises(StoreRefused, match="certificate was not accepted") as caught:
            open_arango(secured, tls=True, ca_file=ca_file).get("meta", "a")
        assert "ca_file" in caught.value.hint


def test_a_certificate_for_another_host(certificates: Path, open_arango: ArangoOpener) -> None:
    with run_standin("--certificate", str(certificates / "there.pem.both")) as server:
        store = open_arango(server, tls=True, ca_file=str(certificates / "there.pem"))
        with pytest.raises(StoreRefused, match="certificate was not accepted"):
            store.get("meta", "a")


def test_a_host_that_is_not_trusted_is_passed_over(
    secured: Server, certificates: Path, open_arango: ArangoOpener
) -> None:
    with run_standin("--certificate", str(certificates / "there.pem.both")) as other:
        store = open_arango(other, secured, tls=True, ca_file=str(certificates / "here.pem"))
        assert store.find("meta", {"unheard_of": 1}) == []


def test_one_side_speaks_tls_and_the_other_does_not(
    secured: Server, first: Server, certificates: Path, open_arango: ArangoOpener
) -> None:
    with pytest.raises(StoreUnavailable):
        open_arango(secured).get("meta", "a")
    with pytest.raises(StoreUnavailable):
        open_arango(first, tls=True, ca_file=str(certificates / "here.pem")).get("meta", "a")


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_that_is_no_authority(
    first: Server, open_arango: ArangoOpener, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StoreRefused, match=str(file)):
        open_arango(first, tls=True, ca_file=str(file))
