"""``python -m tests.arango_standin``: serve until the standard input ends, printing the port.

Whoever started it holds the other end of its input, so it never outlives a test.
"""

from __future__ import annotations

import argparse
import ssl
import sys
import threading

from tests.arango_standin.accounts import Accounts
from tests.arango_standin.server import Server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.arango_standin")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--certificate", help="PEM file with certificate and key: serve TLS")
    parser.add_argument(
        "--account",
        action="append",
        default=[],
        help="USER:PASSWORD for an administrator, USER:PASSWORD:DATABASE,… for anyone else;"
        " :COLLECTION,… behind it are closed to the user",
    )
    options = parser.parse_args()
    accounts = Accounts()
    for account in options.account:
        user, password, *rest = account.split(":")
        databases = set(rest[0].split(",")) if rest else None
        accounts.add(user, password, databases, frozenset(",".join(rest[1:]).split(",")))
    with Server(options.port, accounts) as server:
        if options.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
