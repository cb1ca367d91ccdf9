"""A proxy between a queue and its PostgreSQL server, which loses the answer to a COMMIT."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psycopg
from sqlalchemy import make_url

from postgresql_server import psycopg_url

_COMMIT = b"COMMIT\x00"
_MOST_BYTES = 65_536


class LossyProxy:
    """Hands every byte on, until it is told to lose a COMMIT; use it in a ``with`` block.

    Args:
        url: where the database is.

    Attributes:
        url: where the database is to whoever shall go through the proxy.
        lost: the COMMITs that were lost.
    """

    def __init__(self, url: str) -> None:
        with psycopg.connect(psycopg_url(url)) as connection:
            self._host, self._port = connection.info.host, connection.info.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        direct = make_url(url).difference_update_query(["host"])
        self.url = (
            direct.set(host=host, port=port)
            .update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
            .render_as_string(hide_password=False)
        )
        self.lost = 0
        self._to_lose: list[tuple[bytes, bool]] = []
        self._sockets: list[socket.socket] = []

    def lose(self, *, kept: bool, after: str) -> None:
        """Break the connection at the next COMMIT of a transaction in which a statement with ``after`` was sent.

        Args:
            kept: the server is given the COMMIT, and has carried it out by the time that the connection breaks;
                else it is never told.
            after: a part of that statement.
        """
        self._to_lose.append((after.encode(), kept))

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for one in [self._listener, *self._sockets]:
            _end(one)

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _address = self._listener.accept()
                server = self._connect()
                self._sockets += [client, server]
                threading.Thread(target=self._hand_on, args=(client, server), daemon=True).start()
                threading.Thread(target=_copy, args=(server, client), daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        return server

    def _hand_on(self, client: socket.socket, server: socket.socket) -> None:
        """Hand on what the client sends, which waits for each answer before it sends more."""
        sent = b""
        with suppress(OSError):
            while data := client.recv(_MOST_BYTES):
                sent += data
                if data.endswith(_COMMIT):
                    if self._to_lose and self._to_lose[0][0] in sent:
                        _after, kept = self._to_lose.pop()
                        self._break(client, server, data if kept else b"")
                        return
                    sent = b""
                server.sendall(data)
        _end(client)
        _end(server)

    def _break(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        _end(client)  # first, so that the answer finds nobody
        if data:
            server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while server.recv(_MOST_BYTES):  # until the server has done it, and has left
                    pass
        _end(server)
        self.lost += 1


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_MOST_BYTES):
            target.sendall(data)
    _end(target)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
