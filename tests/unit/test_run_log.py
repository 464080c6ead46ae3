"""Entries of the journal, without a journal: the kernel's lines about memory, processes and system
calls, written by hand in its format and not recorded; and core dumps of systemd-coredump 252.
"""

from __future__ import annotations

import pytest

from nomarr_systemd.core.ids import Component
from nomarr_systemd.postmortem.kernel_log import KernelFacts, find_facts
from nomarr_systemd.postmortem.run_log import JournalTerms, choose_coredump
from nomarr_systemd.postmortem.stack_traces import recognise
from nomarr_systemd.systemd.journal_reader import Entry

UNIT = "nomarr-worker@coom-0.service"
OTHER = "nomarr-worker@coom-10.service"
RUN, NEXT = "f3d548df32304621a9bde272ca358b7f", "6c7c252d808145d9b9f1e5e388b87b6f"
VICTIM = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    "oom_memcg=/nomarr.slice/{unit},task_memcg=/nomarr.slice/{unit},task=segv,pid=334,uid=997"
)
KILLED = (
    "Memory cgroup out of memory: Killed process 334 (segv) total-vm:70152kB, anon-rss:62720kB,"
    " file-rss:1280kB, shmem-rss:0kB, UID:997 pgtables:172kB oom_score_adj:0"
)
REFUSED = "cgroup: fork rejected by pids controller in /nomarr.slice/{unit}"
SECCOMP = (
    "audit: type=1326 audit(1794888340.123:45): auid=4294967295 uid=997 gid=997 ses=4294967295"
    ' subj=unconfined pid=334 comm="python3" exe="/usr/bin/python3.11" sig=31 arch=c000003e'
    " syscall=57 compat=0 ip=0x7f1e3433a24a code=0x80000000"
)
DUMP = """\
Process 182 (segv) of user 999 dumped core.

Stack trace of thread 185:
#0  0x000055bca703e169 decode_header (segv + 0x1169)
#1  0x000055bca703e174 decode (segv + 0x1174)
#2  0x000055bca703e1ac main (segv + 0x11ac)
#3  0x00007f1e3433a24a n/a (libc.so.6 + 0x2724a)
#4  0x00007f1e3433a305 __libc_start_main (libc.so.6 + 0x27305)
#5  0x000055bca703e0a1 _start (segv + 0x10a1)
ELF object binary architecture: AMD x86-64
"""


def kernel(*texts: str) -> list[Entry]:
    return [Entry(n, {"MESSAGE": text}) for n, text in enumerate(texts)]


def dump(at_us: int, environment: str = "") -> Entry:
    fields = {"COREDUMP_TIMESTAMP": str(at_us), "COREDUMP_ENVIRON": environment, "MESSAGE": DUMP}
    return Entry(at_us + 400_000, fields)


@pytest.mark.parametrize(
    ("texts", "pids", "facts"),
    [
        ((KILLED,), {334}, KernelFacts(True, 62720 * 1024)),
        ((KILLED,), {33, 3340}, KernelFacts()),  # another process
        ((VICTIM.format(unit=UNIT), KILLED), set(), KernelFacts(True, 62720 * 1024)),
        ((VICTIM.format(unit=OTHER), KILLED), set(), KernelFacts()),  # another worker's
        ((REFUSED.format(unit=UNIT),), set(), KernelFacts(forks_refused=True)),
        ((REFUSED.format(unit=OTHER),), set(), KernelFacts()),
        ((SECCOMP,), {334}, KernelFacts(system_call=57)),
        ((SECCOMP,), {335}, KernelFacts()),
        (("", "Killed process", "oom-kill:task_memcg=", "\x00"), {334}, KernelFacts()),
    ],
)
def test_what_the_kernel_says(texts: tuple[str, ...], pids: set[int], facts: KernelFacts) -> None:
    assert find_facts(kernel(*texts), UNIT, pids) == facts


def test_a_core_dump_belongs_to_its_run() -> None:
    """The entry comes late; a worker that dies at once may have dumped again by then."""
    first = dump(5_000_000, f"HOME=/\nINVOCATION_ID={RUN}\nLANG=C")
    second = dump(6_000_000, f"INVOCATION_ID={NEXT}")
    assert choose_coredump([first, second], RUN, None) is first
    assert choose_coredump([first, second], NEXT, None) is second
    assert choose_coredump([second], RUN, 9_000_000) is None
    # Without an environment the time decides.
    assert choose_coredump([dump(5_000_000), dump(9_000_000)], RUN, 6_000_000) == dump(5_000_000)
    assert choose_coredump([], RUN, None) is None


def test_the_stack_of_a_core_dump() -> None:
    (trace,) = recognise(DUMP.split("\n"))
    assert (trace.kind, trace.headline) == ("native", "crashed in decode_header")
    assert [frame.function for frame in trace.frames[-3:]] == ["main", "decode", "decode_header"]


def test_who_may_report_a_core_dump() -> None:
    """A worker can send any MESSAGE_ID: journald's own field says who wrote the entry."""
    for user in (False, True):
        (term,) = JournalTerms(Component("coom", 0), user).of_coredump()
        assert any(each.startswith("_SYSTEMD_SLICE=system-systemd") for each in term)
