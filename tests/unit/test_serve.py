"""``--serve`` shows pages to who has the token, and nothing to others; ``--page`` finds the run that is meant."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.features.page import make, serve
from ddplaunch.features.page.serve import _Server
from ddplaunch.features.runs import run_json
from tests.support import golden, run_folders
from tests.support.asked import asked
from tests.support.processes import wait_until


def called(folder: Path, before: str, run_id: str) -> None:
    """The run in this folder has another id."""
    for file in ("run.json", "report.json"):
        (folder / file).write_text((folder / file).read_text().replace(before, run_id))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, with two runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("run-a", "run-b"):
        called(run_folders.write(tmp_path / "ddplaunch" / name, lines=5), run_folders.RUN_ID, name)
    return tmp_path / "ddplaunch"


@pytest.fixture
def server(base: Path) -> Iterator[_Server]:
    server = _Server(0, None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: _Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {"Host": host} if host is not None else {}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_ctrl_c_ends_it_as_soon_as_the_address_is_shown(base: Path) -> None:
    shown = []

    def show(address: str) -> None:
        shown.append(address)
        raise KeyboardInterrupt

    serve.serve(asked(0, show))
    assert len(shown) == 1


def test_the_index_leads_to_each_page_and_nothing_is_written(server: _Server, base: Path):
    before = sorted(base.rglob("*"))
    status, text, headers = ask(server, f"/{server.token}/")
    assert status == 200
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    addresses = re.findall(r'href="([^"]*)"', text)
    assert len(addresses) == 2
    for address in addresses:
        status, text, _ = ask(server, f"/{server.token}/{address}")
        assert status == 200
        assert "KeyError: &#39;lr&#39;" in text
    assert sorted(base.rglob("*")) == before


def test_the_files_to_which_a_page_leads_are_served_as_text_and_no_others(
    server: _Server, base: Path, monkeypatch: pytest.MonkeyPatch
):
    (base / "run-a" / "console.log").write_text("<b>é</b>\n")
    (base / "run-a" / "secret").write_text("no link leads here")
    monkeypatch.setattr(serve, "_FRESH_S", 0)
    pages = re.findall(r'href="([^"]*)"', ask(server, f"/{server.token}/")[1])
    [page] = [each for each in pages if "run-a" in ask(server, f"/{server.token}/{each}")[1]]
    status, text, headers = ask(server, f"/{server.token}/{page}console.log")
    assert (status, text) == (200, "<b>é</b>\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    for name in ("secret", "run.json", "./console.log", "x/../console.log", "..%2frun-b%2freport.json", "samples/"):
        assert ask(server, f"/{server.token}/{page}{name}")[:2] == (404, "")
    monkeypatch.setattr(serve, "_MAX_FILE_BYTES", 1 << 20)
    (base / "run-a" / "console.log").write_text("12345678\n" * (1 << 18))
    text = ask(server, f"/{server.token}/{page}console.log")[1]
    assert text.startswith("... only the last 1 MB of console.log are here\n12345678\n")
    assert len(text) < (1 << 20) + 100


def test_no_link_leads_out_of_the_run_folder(server: _Server, base: Path, tmp_path: Path):
    run, outside = base / "run-a", tmp_path / "outside"
    outside.mkdir()
    for name in ("console.log", "hang.txt", "stdout.log", "stderr.log"):
        (outside / name).write_text("a secret of the user\n")
    for name in ("console.log", "hang.txt"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / name)
    event = {"t": 1, "event": "attempt_started", "attempt": 0, "workers": 2, "first_rank": 0, "host": "gpu1"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "attempt_0" / "1").mkdir(parents=True)
    (run / "attempt_0" / "1" / "stdout.log").write_text("the output\n")
    (run / "attempt_0" / "0").symlink_to(outside)
    pages = re.findall(r'href="([^"]*)"', ask(server, f"/{server.token}/")[1])
    [page] = [each for each in pages if "run-a" in ask(server, f"/{server.token}/{each}")[1]]
    assert "a secret" not in ask(server, f"/{server.token}/{page}")[1]
    for name in ("console.log", "hang.txt", "attempt_0/0/stdout.log", "attempt_0/0/stderr.log"):
        assert ask(server, f"/{server.token}/{page}{name}")[:2] == (404, ""), name
    assert ask(server, f"/{server.token}/{page}attempt_0/1/stdout.log")[:2] == (200, "the output\n")
    (run / "attempt_0" / "1").rename(tmp_path / "moved")
    (run / "attempt_0" / "1").symlink_to(outside)
    assert ask(server, f"/{server.token}/{page}attempt_0/1/stdout.log")[:2] == (404, ""), "since the page was made"


def test_a_page_or_file_of_one_run_reads_no_report_of_the_others(
    server: _Server, base: Path, monkeypatch: pytest.MonkeyPatch
):
    pages = re.findall(r'href="([^"]*)"', ask(server, f"/{server.token}/")[1])
    read: list[Path] = []
    report = run_json.report
    monkeypatch.setattr(run_json, "report", lambda folder: read.append(folder) or report(folder))
    for name in ("", "report.json"):
        assert ask(server, f"/{server.token}/{pages[0]}{name}")[0] == 200
    assert len({*read}) == 1


def test_runs_that_go_on_come_first(server: _Server, base: Path):
    (base / "run-a" / "report.json").unlink()
    with (base / "run-a" / ".ddplaunch-run").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = ask(server, f"/{server.token}/")[1]
    assert re.findall(r">(run-[ab])</a>.*?<td>(running|exit 1)</td>", text) == [
        ("run-a", "running"),
        ("run-b", "exit 1"),
    ]


def test_without_the_token_or_for_anything_else_there_is_nothing(server: _Server):
    def status(path: str) -> str:
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            line = f"GET {path.format(token=server.token)} HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
            client.sendall(line.encode("latin-1"))
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        return f"{answer.split()[1].decode()}{', the runs' * (b'run-a' in answer)}"

    golden.check_answers("served_paths", status)


def test_a_name_that_another_site_points_here_is_refused(server: _Server):
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", ""):
        assert ask(server, f"/{server.token}/", host=host)[:2] == (421, "")
    for host in ("127.0.0.1", "localhost:9000"):  # Port 80; another port that ssh -L forwards.
        assert ask(server, f"/{server.token}/", host=host)[0] == 200


def test_a_folder_of_any_name_has_a_page(server: _Server, base: Path):
    (base / "run-a").rename(base / "100% ü? #1")
    addresses = re.findall(r'href="([^"]*)"', ask(server, f"/{server.token}/")[1])
    assert {ask(server, f"/{server.token}/{address}")[0] for address in addresses} == {200}
    assert len(addresses) == 2


def test_a_client_that_sends_its_request_byte_by_byte_is_cut_off(server: _Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "_REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=0.05) as client:
        deadline = time.monotonic() + 30
        with contextlib.suppress(OSError):
            client.sendall(b"GET /")
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    if not client.recv(1):
                        break
                client.sendall(b"x")
        assert time.monotonic() < deadline
    wait_until(lambda: not server.asking)
    assert ask(server, f"/{server.token}/")[0] == 200


def test_clients_that_show_no_token_keep_nobody_out(server: _Server):
    with contextlib.ExitStack() as stack:
        for number in range(80):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=30))
            client.sendall((b"", b"GET /x", b"GET / HTTP/1.1\r\n")[number % 3])
        assert ask(server, f"/{server.token}/")[0] == 200
    wait_until(lambda: not server.asking)


@pytest.mark.parametrize(
    "request_",
    ["GET /x/ HTTP/1.0\r\n\r\n", "GET / x HTTP/1.0\r\n\r\n", "POST / HTTP/1.0\r\n\r\n", "GET /" + "x" * 70_000],
)
def test_an_answer_without_a_page_has_no_text_and_all_headers(server: _Server, request_: str):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
        client.sendall(request_.encode())
        answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert ("Content-Security-Policy: default-src 'none'" in head, "nosniff" in head, body) == (True, True, "")


def test_it_only_reads(server: _Server):
    methods = ("POST", "PUT", "DELETE", "OPTIONS")
    assert {ask(server, f"/{server.token}/", method)[0] for method in methods} == {501}
    status, text, headers = ask(server, f"/{server.token}/", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_only_the_loopback_address_listens(server: _Server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert len(server.token) >= 32


# --page.


def paths(run_id: str, log_dir: str | None = None) -> list[str]:
    shown: list[str] = []
    make.page(asked(run_id, shown.append, log_dir=log_dir))
    return shown


def test_a_run_of_several_launchers_has_one_page_and_one_address(base: Path, server: _Server):
    # Of other tests of this user there may be a live run, which is found by its id wherever it is.
    shared = base / "shared-5c1f"
    shared.mkdir()
    (shared / ".ddplaunch-nodes").write_text("key")
    for name in ("run-a", "run-b"):
        (base / name).rename(shared / name)
        called(shared / name, name, shared.name)
    assert paths(shared.name) == [str(shared / "run.html")]
    assert paths(f"{shared.name}/run-b") == [str(shared / "run-b" / "run.html")]
    (address,) = re.findall(r'href="([^"]*)"', ask(server, f"/{server.token}/")[1])
    assert "2 launchers made this run" in ask(server, f"/{server.token}/{address}")[1]
