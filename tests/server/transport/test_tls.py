"""TLS with certificates of our own, seen from clients as people use them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import tracemalloc
from typing import Any

import httpx
import openai
import pytest

from jaxllm.server.command_line.options import parse
from jaxllm.server.transport.tls import Certificates, TlsFiles
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings
from tests.server.transport.certificates import Pair, authority, signed

SILENT = 50  # connections

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Who signs."""
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, ca: Pair) -> Pair:
    """The server's."""
    return signed(tmp_path_factory.mktemp("server"), "server", ca)


def trusting(ca: Pair) -> ssl.SSLContext:
    """A client that knows the authority."""
    return ssl.create_default_context(cafile=str(ca.cert))


def served_name(port: int, context: ssl.SSLContext) -> str:
    """The name in the certificate that a new connection gets."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as sock,
    ):
        names: Any = sock.getpeercert()
        return dict(part[0] for part in names["subject"])["commonName"]


def test_clients_talk_over_tls_whole_and_streamed(
    tokenizer: Tokenizer, ca: Pair, pair: Pair
) -> None:
    tls = Certificates(TlsFiles(certfile=str(pair.cert), keyfile=str(pair.key))).context
    with Running(tokenizer, with_settings(max_body_size=1 << 16), tls=tls) as running:
        url = f"https://localhost:{running.port}"
        with httpx.Client(verify=trusting(ca)) as client:
            assert client.get(f"{url}/health").json()["status"] == "ok"
            early = client.post(f"{url}/v1/completions", content=b"x" * (1 << 20))
            assert (early.status_code, early.json()["error"]["code"]) == (413, "request_too_large")
        with openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=trusting(ca)),
        ) as client:
            whole = client.completions.create(model="fake", prompt="abcd")
            chunks = client.completions.create(model="fake", prompt="abcd", stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):  # no plain HTTP on that port
            httpx.get(f"http://127.0.0.1:{running.port}/health")


def test_connections_that_say_nothing_hold_little(
    tokenizer: Tokenizer, ca: Pair, pair: Pair
) -> None:
    """Nobody knows yet who they are, and there may be thousands."""
    tls = Certificates(TlsFiles(certfile=str(pair.cert), keyfile=str(pair.key))).context
    with Running(tokenizer, tls=tls) as running, contextlib.ExitStack() as silent:
        served_name(running.port, trusting(ca))
        tracemalloc.start()
        try:
            for _ in range(SILENT):
                address = "127.0.0.1", running.port
                silent.enter_context(socket.create_connection(address, timeout=60))
            served_name(running.port, trusting(ca))  # which is taken after them
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held < SILENT * (64 << 10)


def test_a_client_without_a_certificate_is_turned_away_where_one_is_required(
    tokenizer: Tokenizer, ca: Pair, pair: Pair, tmp_path: pathlib.Path
) -> None:
    files = TlsFiles(
        certfile=str(pair.cert), keyfile=str(pair.key), ca_certs=str(ca.cert), cert_reqs=2
    )
    own = signed(tmp_path, "client", ca)
    with Running(tokenizer, tls=Certificates(files).context) as running:
        url = f"https://localhost:{running.port}/version"
        known = trusting(ca)
        known.load_cert_chain(own.cert, own.key)
        with httpx.Client(verify=known) as client:
            assert client.get(url).status_code == 200
        with httpx.Client(verify=trusting(ca)) as client, pytest.raises(httpx.TransportError):
            client.get(url)


def replace(path: pathlib.Path, by: pathlib.Path) -> None:
    """As a rotation does: another file under the same name."""
    shutil.copy(by, fresh := path.with_suffix(".new"))
    os.replace(fresh, path)


def test_a_server_takes_a_new_certificate_without_a_restart(
    launch: Any, ca: Pair, tmp_path: pathlib.Path
) -> None:
    used, later = signed(tmp_path, "used", ca), signed(tmp_path, "later", ca)
    flags = ("--ssl-certfile", str(used.cert), "--ssl-keyfile", str(used.key))
    server = launch(*flags, "--enable-ssl-refresh")
    server.says("serving m on https://127.0.0.1:")
    port = int(server.log.partition("https://127.0.0.1:")[2].split(" ")[0])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        trusting(ca).wrap_socket(plain, server_hostname="localhost") as old,
    ):
        assert served_name(port, trusting(ca)) == "used"
        replace(used.key, later.key)
        server.says("the certificate in use stays")  # half a rotation
        assert served_name(port, trusting(ca)) == "used"
        replace(used.cert, later.cert)
        server.says("is in use for new connections")
        assert served_name(port, trusting(ca)) == "later"
        old.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        assert old.recv(100).startswith(b"HTTP/1.1 200"), "old connections go on"


def test_files_that_did_not_change_are_not_loaded_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(TlsFiles(certfile=str(pair.cert), keyfile=str(pair.key)))
    monkeypatch.setattr(certificates, "_load", lambda _: pytest.fail("loaded again"))
    assert certificates.refresh() is False


def test_an_encrypted_key_opens_with_its_password_and_never_asks(
    ca: Pair, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = signed(tmp_path, "locked", ca, password="open sesame")
    flags = ["--ssl-certfile", str(locked.cert), "--ssl-keyfile", str(locked.key)]
    options = parse([*flags, "--ssl-keyfile-password", "open sesame"], {})
    assert options.tls is not None
    assert "sesame" not in options.summary
    for wrong in ([], ["--ssl-keyfile-password", "wrong"]):
        with pytest.raises(SystemExit):
            parse([*flags, *wrong], {})
        assert "--ssl-keyfile-password opens a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ssl-keyfile", "KEY"], "set --ssl-certfile"),
        (["--enable-ssl-refresh"], "set --ssl-certfile"),
        (["--ssl-certfile", "CERT"], "cannot be used: "),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "CA"], "cannot be used: "),
        (["--ssl-certfile", "/no/such", "--ssl-keyfile", "KEY"], "No such file"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-cert-reqs", "2"], "ca-certs"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-ca-certs", "KEY"], "ca-certs"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-ciphers", "x"], "no cipher"),
        (["--ssl-cert-reqs", "3"], "invalid choice"),
    ],
    ids=range(9),
)
def test_certificates_that_cannot_work_are_refused_before_the_start(
    flags: list[str], says: str, ca: Pair, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"CERT": str(pair.cert), "KEY": str(pair.key), "CA": str(ca.key)}
    with pytest.raises(SystemExit) as exit:
        parse([names.get(word, word) for word in flags], {})
    assert exit.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is the client")
def test_curl_reaches_a_unix_socket_and_needs_the_key(launch: Any, tmp_path: pathlib.Path) -> None:
    path, keys = tmp_path / "socket", tmp_path / "keys"
    keys.write_text("secret\n")
    launch("--uds", str(path), "--api-key-file", str(keys)).says("serving m on the Unix socket")

    def curl(*arguments: str) -> str:
        command = ["curl", "-s", "-o", str(tmp_path / "body"), "-w", "%{http_code}"]
        done = subprocess.run(
            [*command, "--unix-socket", str(path), *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    url = "http://localhost/v1/models"
    assert curl("http://localhost/health") == "200"
    assert curl(url) == "401"
    assert curl("-H", "Authorization: Bearer wrong", url) == "401"
    assert curl("-H", "Authorization: Bearer secret", url) == "200"
