"""Store URLs: what each kind means, and that a refusal says why without saying the password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.config.store_url import (
    ArangoUrl,
    PostgresUrl,
    SqliteUrl,
    find_addresses,
    parse_address,
    parse_store_url,
)
from nomarr_systemd.core.errors import BadName


@pytest.mark.parametrize(
    ("url", "meaning"),
    [
        ("sqlite:///var/lib/nomarr", SqliteUrl("/var/lib/nomarr")),
        ("sqlite:///var/lib/nomarr/", SqliteUrl("/var/lib/nomarr")),
        ("sqlite:////srv//my state", SqliteUrl("/srv/my state")),
        ("arangodb://root@db/nomarr", ArangoUrl("root", (("db", 8529),), "nomarr", tls=False)),
        (
            "arangodb+tls://n@db.example.org:443/_system",
            ArangoUrl("n", (("db.example.org", 443),), "_system", tls=True),
        ),
        (
            "arangodb://n@a:1,b,[::1]:3,[fe80::1]/d",
            ArangoUrl("n", (("a", 1), ("b", 8529), ("::1", 3), ("fe80::1", 8529)), "d", tls=False),
        ),
        (
            "arangodb://me@home@10.0.0.1/d-1",
            ArangoUrl("me@home", (("10.0.0.1", 8529),), "d-1", False),
        ),
        (
            "postgresql://n@db1,db2:6432/d",
            PostgresUrl("n", (("db1", 5432), ("db2", 6432)), "d", tls=False),
        ),
        ("postgresql+tls://n@db/d", PostgresUrl("n", (("db", 5432),), "d", tls=True)),
    ],
)
def test_good_urls(url: str, meaning: SqliteUrl | ArangoUrl | PostgresUrl) -> None:
    assert parse_store_url(url) == meaning


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "does not start with"),
        ("/var/lib/nomarr", "does not start with"),
        ("mysql://root@db/x", "does not start with"),
        ("postgresql+ssl://root@db/x", "does not start with"),
        ("postgresql+tls+tls://root@db/x", "does not start with"),
        ("postgresql:root@db/x", "does not start with"),
        ("postgresql://root@db", "name of a database"),
        ("sqlite:/var/lib", "does not start with"),
        ("sqlite://var/lib", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///", "must have a name"),
        ("sqlite:///var/../etc", "no . or .."),
        ("sqlite:///var/./etc", "no . or .."),
        ("sqlite:///var?mode=ro", "no meaning"),
        ("sqlite:///var/%h", "no meaning"),
        ("sqlite:///var\n/x", "cannot be printed"),
        ("arangodb://db/nomarr", "no user"),
        ("arangodb://@db/nomarr", "no user"),
        ("arangodb://a%40b@db/nomarr", "characters that a user cannot have"),
        ("arangodb://root@db", "name of a database"),
        ("arangodb://root@db/", "name of a database"),
        ("arangodb://root@db/a/b", "name of a database"),
        ("arangodb://root@db/9a", "name of a database"),
        ("arangodb://root@/nomarr", "host: the host is not a name"),
        ("arangodb://root@a,,b/nomarr", "host 2 of 3: the host is not a name"),
        ("arangodb://root@a,b:0/nomarr", "host 2 of 2: the port"),
        ("arangodb://root@a:65536/nomarr", "the port is not a number from 1 to 65535"),
        ("arangodb://root@a:٣/nomarr", "the port"),
        ("arangodb://root@::1/nomarr", "stands in brackets"),
        ("arangodb://root@[::1/nomarr", "not followed by :PORT"),
        ("arangodb://root@[zz]/nomarr", "not an IPv6 address"),
    ],
)
def test_bad_urls_say_why_and_how(url: str, why: str) -> None:
    with pytest.raises(BadName) as caught:
        parse_store_url(url)
    assert why in str(caught.value)
    assert "sqlite:///" in caught.value.hint
    assert "arangodb+tls://" in caught.value.hint
    assert "postgresql+tls://" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "arangodb://root:s3cret@db/nomarr",
        "arangodb+tls://root:@db/nomarr",
        "arangodb://root:s3/cret@db/nomarr",
        "arangodb://root:s3@cret@db/nomarr",
    ],
)
def test_a_password_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(BadName, match="process lists") as caught:
        parse_store_url(url)
    assert "password_file" in caught.value.hint
    assert "credential" in caught.value.hint


@given(
    st.sampled_from(["arangodb://", "postgresql+tls://", "arango://", "sqlite://", ""]),
    st.text("ab:@/,[]?#", max_size=12),
    st.text("ab:@/,[]?#", max_size=12),
)
def test_no_message_repeats_a_secret(scheme: str, before: str, after: str) -> None:
    assert "s3cret" not in refusal_of(f"{scheme}{before}s3cret{after}")


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for prefix in ("", "sqlite:///", "arangodb://", "arangodb://u@", "arangodb://u@h:"):
        assert refusal_of(prefix + text).isprintable()


def refusal_of(url: str) -> str:
    """Message and hint, or nothing when the URL is good."""
    try:
        parse_store_url(url)
    except BadName as error:
        return f"{error} {error.hint}"
    return ""


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("sqlite:///var/lib/nomarr", ()),
        ("postgresql://a@10.0.0.1,[::1]:5/nomarr", ("10.0.0.1", "localhost")),
        ("arangodb+tls://a@localhost/nomarr", ("localhost",)),
        ("arangodb://a@10.0.0.1,db.example/nomarr", None),
    ],
)
def test_addresses_of_the_hosts(url: str, addresses: tuple[str, ...] | None) -> None:
    assert find_addresses(url) == addresses


def test_addresses() -> None:
    assert parse_address("127.0.0.1:8765") == ("127.0.0.1", 8765)
    assert parse_address("[::1]:1") == ("::1", 1)
    assert parse_address("localhost", default_port=9) == ("localhost", 9)
    for bad in ("", ":8765", "localhost", "h:", "h:99999", "::1:80", "[::1]80", "-h:1", "h h:1"):
        with pytest.raises(BadName):
            parse_address(bad)
    with pytest.raises(BadName):
        parse_address("a" * 64 + ":1")
    with pytest.raises(BadName):
        parse_address(".".join(["a" * 60] * 5) + ":1")


def test_the_import_is_cheap() -> None:
    code = "import sys, nomarr_systemd.config.store_url; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: what site itself imports is not ours
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"urllib", "ipaddress", "dataclasses"} & set(run.stdout.split())
