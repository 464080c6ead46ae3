"""A worker that dies in every way there is."""

from __future__ import annotations

ACTOR = """\
#!/usr/bin/python3 -I
import json, os, signal, socket, sys, time

mode = sys.argv[1]
once = sys.argv[2]  # made at the first death: the second run behaves
pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
me = os.environ["NOMARR_COMPONENT_ID"]

def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])

def frame(**fields):
    os.write(pipe, b"HEALTH|" + json.dumps({"component_id": me, **fields}).encode() + b"\\n")

def live():
    while True:
        notify("WATCHDOG=1")
        frame(status="healthy")
        time.sleep(0.1)

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
first = not os.path.exists(once)
if first:
    open(once, "w").close()
if not first:
    notify("READY=1")
    live()
if mode == "silent":
    time.sleep(1000)
notify("READY=1")
frame(status="healthy")
if mode.startswith("exit"):
    time.sleep(0.2)
    sys.exit(int(mode[4:]))
if mode == "watchdog":
    while True:
        frame(status="healthy")
        time.sleep(0.1)
if mode == "invalid":
    while True:
        notify("WATCHDOG=1")
        os.write(pipe, b"HEALTH|{nonsense}\\n")
        time.sleep(0.1)
if mode == "recovering":
    while True:
        notify("WATCHDOG=1")
        frame(status="recovering", recover_for_s=1000)
        time.sleep(0.1)
if mode == "closed":
    os.close(pipe)
    while True:
        notify("WATCHDOG=1")
        time.sleep(0.1)
live()
"""
