"""The worker that most tests want: healthy until it is stopped. It is in Perl, which every Debian
has: a shell forks a program for each pause and each word to systemd, 5 ms of processor time in a
second, and with 40 workers that is more than what is tested.
"""

from __future__ import annotations

from typing import Final

_SCRIPT: Final = """\
#!/usr/bin/perl
# Healthy until a SIGTERM, which it answers by exiting with its argument.
$SIG{TERM} = sub { exit $ARGV[0] };
$SIG{FPE} = 'DEFAULT';  # which Perl ignores
socket $manager, 1, 2, 0;  # AF_UNIX, SOCK_DGRAM
connect $manager, pack 'S a*', 1, $ENV{NOTIFY_SOCKET} =~ s/^@/\\0/r;
syswrite $manager, 'READY';
open($pipe, '>', $ENV{NOMARR_HEALTH_PIPE}) or exit 2;  # waits for a supervisor
while (1) {
    syswrite $pipe, qq(HEALTH|{"component_id":"$ENV{NOMARR_COMPONENT_ID}",) . 'FRAME' . "}\\n";
    select undef, undef, undef, PAUSE_S;
    LATER
}
"""
HEALTHY: Final = '"status":"healthy"'


def make_worker(
    *, pause_s: float, ready: str = "READY=1", later: str = "", frame: str = HEALTHY
) -> str:
    """The program of one that tells systemd ``ready``, then after each pause ``later``, and sends
    such a frame before each."""
    text = _SCRIPT.replace("READY", ready).replace("PAUSE_S", f"{pause_s:g}")
    text = text.replace("LATER", f"syswrite $manager, '{later}';" if later else "")
    return text.replace("FRAME", frame)
