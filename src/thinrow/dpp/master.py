"""The master: counts out one pool of workers to readers, knows how each is doing, and shows it.

It holds no batch and no order: what a batch is follows from spec, seed and number alone, so that a master that is
killed takes nothing with it. What it keeps is who was heard of within ``lease_s``, and a ledger, the position that each
reader reported last, in a file that a new master reads.

``GET /`` is a page for people, ``/status`` the same as JSON, ``/metrics`` for Prometheus; ``POST /v1/report`` is what
readers say (``thinrow.dpp.engines.shared``).
"""

from __future__ import annotations

import html
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from thinrow.core.errors import InputError
from thinrow.dpp.shares import Wish, shares

_FORMAT = 1
_log = logging.getLogger(__name__)
_MAX_BODY = 1 << 16
_SAVE_S = 1.0
#: Columns of the page and of ``thinrow dpp top``: what of a member's status, and how it is shown.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reader", "name", "{}"),
    ("session", "session", "{}"),
    ("position", "head", "{:,}"),
    ("of", "items", "{}"),
    ("verified", "verified", "{:,}"),
    ("items/s", "rate", "{:.2f}"),
    ("stall", "stall", "{:.1%}"),
    ("waste", "waste", "{:.1%}"),
    ("buffer", "depth", "{:.0%}"),
    ("workers", "workers", "{}"),
    ("share", "share", "{}"),
    ("restarts", "restarts", "{}"),
    ("bottleneck", "bottleneck", "{}"),
    ("why", "why", "{}"),
)


@dataclass(slots=True)
class _Member:
    id: str
    wish: Wish
    heard: float
    said: dict[str, Any]


class Master:
    """Args:
    workers: how many there are to share.
    ledger: file of positions; None for none.
    lease_s: seconds after which a reader that is not heard of has no share.
    clock: seconds, ascending.

    Raises:
        InputError: a number is not above 0, or the file holds something else.
    """

    def __init__(
        self,
        workers: int,
        *,
        ledger: str | Path | None = None,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if workers < 1 or not lease_s > 0:
            raise InputError(f"workers={workers}, lease_s={lease_s}; both must be above 0")
        self.workers, self._lease_s, self._clock = workers, lease_s, clock
        self._members: dict[str, _Member] = {}
        self._lock = threading.Lock()
        self._path = None if ledger is None else Path(ledger)
        self._saved = -_SAVE_S
        self._ledger = _read(self._path)
        try:
            self._write()
        except OSError as e:
            raise InputError(f"the ledger {self._path} cannot be written: {e}; name another file") from e

    def report(self, said: dict[str, Any]) -> int:
        """What a reader said: its share of the workers.

        Args:
            said: ``id``, ``name``, ``session``, ``weight`` and ``want``, or ``leave``; ``head`` and figures.

        Raises:
            InputError: it is no report, or another reader has the name.
        """
        try:
            name, one = str(said["name"]), str(said["id"])
            wish = Wish(str(said["session"]), float(said["weight"]), max(int(said.get("want", 1)), 1))
            figures = _figures(said)
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"not a report: {e!r}; it has id, name, session, weight and want") from None
        if not 0 < wish.weight < float("inf"):
            raise InputError(f"weight={wish.weight}; it must be above 0")
        with self._lock:
            self._expire()
            held = self._members.get(name)
            if held is not None and held.id != one:
                raise InputError(
                    f"a reader named {name!r} runs already, heard of {self._clock() - held.heard:.1f} s ago; give each "
                    f"rank a name of its own, or, where it died, begin again when {self._lease_s:g} s have passed"
                )
            if said.get("leave"):
                self._members.pop(name, None)
                self._save(True)
                return 0
            self._members[name] = _Member(one, wish, self._clock(), figures)
            self._ledger[name] = figures["head"]
            self._save(held is None)
            return self._shares()[name]

    def status(self) -> dict[str, Any]:
        """Who is there and how it is doing; ``ledger`` also has readers that were here before."""
        with self._lock:
            self._expire()
            given = self._shares()
            members = []
            for name, one in sorted(self._members.items()):
                figures = {"share": given[name], "heard_s": self._clock() - one.heard}
                members.append({"name": name, "session": one.wish.session, **one.said, **figures})
            return {"workers": self.workers, "members": members, "ledger": dict(sorted(self._ledger.items()))}

    def flush(self) -> None:
        """Write the ledger; while reports come it is written once a second."""
        with self._lock:
            self._save(True)

    def _shares(self) -> dict[str, int]:
        return shares(self.workers, {n: m.wish for n, m in self._members.items()})

    def _expire(self) -> None:
        now = self._clock()
        for name in [n for n, m in self._members.items() if now - m.heard > self._lease_s]:
            del self._members[name]

    def _save(self, at_once: bool) -> None:
        """The ledger, once a second: a reader resumes from its own checkpoint, not from here."""
        if self._path is None or not (at_once or self._clock() - self._saved >= _SAVE_S):
            return
        self._saved = self._clock()
        try:
            self._write()
        except OSError as e:
            # It is for people to read: readers get their shares all the same.
            _log.warning("the ledger %s was not written: %s", self._path, e)

    def _write(self) -> None:
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text(json.dumps({"format": _FORMAT, "positions": self._ledger}))
            os.replace(fresh, self._path)


def _figures(said: dict[str, Any]) -> dict[str, Any]:
    """What of a report is shown. Raises TypeError or ValueError where a number is none."""
    found: dict[str, Any] = {k: int(said.get(k, 0)) for k in ("head", "verified", "workers", "restarts")}
    found["items"] = "no end" if said.get("stop") is None else f"{int(said['stop']):,}"
    found |= {k: float(said.get(k, 0)) for k in ("stall", "waste", "depth")}
    found |= {"rate": float(said.get("items", 0)) / max(float(said.get("seconds", 1)), 1e-9)}
    return found | {k: str(said.get(k, ""))[:500] for k in ("bottleneck", "why")}


def _read(path: Path | None) -> dict[str, int]:
    if path is None or not path.exists():
        return {}
    try:
        held = json.loads(path.read_text())
        if held["format"] != _FORMAT:
            raise InputError(f"{path} has format {held['format']}, this thinrow reads {_FORMAT}; update thinrow")
        return {str(name): int(head) for name, head in held["positions"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{path} is no ledger of a master: {e!r}; name another file") from e


def page(status: dict[str, Any]) -> str:
    """The status as HTML: one row a reader; it loads itself again every two seconds."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown.format(m[key]))}</td>" for _, key, shown in COLUMNS) + "</tr>"
        for m in status["members"]
    )
    names = "".join(f"<th>{html.escape(name)}</th>" for name, _, _ in COLUMNS)
    used = sum(m["workers"] for m in status["members"])
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/><meta http-equiv="refresh" content="2"/>'
        "<title>thinrow dpp</title><style>body{font:14px system-ui;margin:2em}td,th{padding:.3em .8em;text-align:left}"
        "tr:nth-child(even){background:#f2f2f2}th{border-bottom:2px solid #888}</style></head><body>"
        f"<h1>thinrow dpp</h1><p>{len(status['members'])} readers, {used} of {status['workers']} workers</p>"
        f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></body></html>"
    )


_METRICS: tuple[tuple[str, str, str], ...] = (
    ("position", "head", "Items that the reader has taken, over all its life."),
    ("items_per_second", "rate", "Items that the reader took in the last interval."),
    ("versions_verified", "verified", "Versions that the reader's histories were held against, since it began."),
    ("stall_ratio", "stall", "Share of its time that the reader waited for items."),
    ("waste_ratio", "waste", "Share of their time in which workers made nothing."),
    ("buffer_ratio", "depth", "Share of the window that waited for the reader."),
    ("workers", "workers", "Workers of the reader."),
    ("share", "share", "Workers that the reader may have."),
    ("worker_restarts", "restarts", "Workers that ended and were replaced."),
    ("heard_seconds", "heard_s", "Since the reader last said something."),
)


def metrics(status: dict[str, Any]) -> str:
    """The status in the text format of Prometheus (0.0.4)."""
    lines = ["# HELP thinrow_dpp_pool_workers Workers that are shared.", "# TYPE thinrow_dpp_pool_workers gauge"]
    lines.append(f"thinrow_dpp_pool_workers {status['workers']}")
    for name, key, text in _METRICS:
        lines += [f"# HELP thinrow_dpp_{name} {text}", f"# TYPE thinrow_dpp_{name} gauge"]
        lines += [f"thinrow_dpp_{name}{{{_labels(m)}}} {m[key]}" for m in status["members"]]
    lines += ["# HELP thinrow_dpp_bottleneck What holds the reader up: 1.", "# TYPE thinrow_dpp_bottleneck gauge"]
    held = [m for m in status["members"] if m["bottleneck"]]
    lines += [f'thinrow_dpp_bottleneck{{{_labels(m)},what="{_escaped(m["bottleneck"])}"}} 1' for m in held]
    return "\n".join(lines) + "\n"


def _labels(member: dict[str, Any]) -> str:
    return f'reader="{_escaped(member["name"])}",session="{_escaped(member["session"])}"'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MasterServer:
    """A ``Master`` over HTTP, in threads of this process, until it is closed.

    Args:
        host, port: where to listen; port 0 takes a free one.

    Raises:
        InputError: the address is taken, or not of this machine.
    """

    def __init__(self, master: Master, host: str = "127.0.0.1", port: int = 0) -> None:
        handler = type("_Bound", (_Handler,), {"master": master})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as e:
            raise InputError(f"cannot listen at {host}:{port}: {e.strerror}; name another address or port") from e
        self.master, self.host, self.port = master, host, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What readers are told."""
        return f"http://{self.host}:{self.port}"

    def close(self) -> None:
        """Stop listening, and write the ledger."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.master.flush()

    def __enter__(self) -> MasterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    master: ClassVar[Master]
    timeout = 10

    def do_GET(self) -> None:
        """The page, the status, the metrics."""
        status = self.master.status()
        if self.path == "/":
            self._answer(200, "text/html; charset=utf-8", page(status))
        elif self.path == "/status":
            self._answer(200, "application/json", json.dumps(status))
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", metrics(status))
        else:
            self._answer(404, "text/plain", "there are /, /status, /metrics and /v1/report")

    def do_POST(self) -> None:
        """A report."""
        length = self.headers.get("content-length", "")
        if self.path != "/v1/report" or not length.isdigit() or int(length) > _MAX_BODY:
            self._answer(400, "text/plain", f"post a report of at most {_MAX_BODY} bytes to /v1/report")
            return
        try:
            said = json.loads(self.rfile.read(int(length)))
            if not isinstance(said, dict):
                raise InputError("not a report: it is no object")
            given = self.master.report(said)
        except InputError as e:
            self._answer(409 if "runs already" in str(e) else 400, "text/plain", str(e))
        except ValueError as e:
            self._answer(400, "text/plain", f"not a report: {e}")
        else:
            self._answer(200, "application/json", json.dumps({"workers": given}))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line a report is too much."""
