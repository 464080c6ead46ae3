"""Exit facts: every word systemd can say has a class, a code and a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core.death import LABELS, RESULTS, classify, exit_words

# The whole table of systemd.exec(5), "Summary of possible service result variable values".
TABLE = [
    ("protocol", "", "", "exit", -1, "stopped before it said that it was ready"),
    ("protocol", "exited", "0", "exit", 0, "before it said that it was ready; exited with"),
    ("timeout", "killed", "TERM", "start-timeout", -15, "was not ready in time; killed by SIGTERM"),
    ("timeout", "killed", "KILL", "start-timeout", -9, "was not ready in time"),
    ("timeout", "exited", "1", "start-timeout", 1, "was not ready in time; exited with status 1"),
    ("exit-code", "exited", "1", "exit", 1, "exited with status 1"),
    ("exit-code", "exited", "70", "exit", 70, "exited with status 70 (too many errors in a row)"),
    ("exit-code", "exited", "75", "exit", 75, "exited with status 75 (temporary failure)"),
    ("exit-code", "exited", "78", "config", 78, "exited with status 78 (configuration)"),
    ("exit-code", "exited", "203", "exit", 203, "its program cannot be executed"),
    ("exit-code", "exited", "255", "exit", 255, "exited with status 255"),
    ("signal", "killed", "KILL", "signal", -9, "killed by SIGKILL"),
    ("signal", "killed", "HUP", "signal", -1, "killed by SIGHUP"),
    ("signal", "killed", "RTMIN", "signal", -34, "killed by SIGRTMIN"),
    ("signal", "killed", "RTMIN+3", "signal", -37, "killed by SIGRTMIN+3"),
    ("core-dump", "dumped", "SEGV", "core-dump", -11, "killed by SIGSEGV (core dumped)"),
    ("core-dump", "dumped", "ABRT", "core-dump", -6, "killed by SIGABRT (core dumped)"),
    ("watchdog", "dumped", "ABRT", "watchdog", -2, "watchdog: no progress was reported"),
    ("watchdog", "killed", "KILL", "watchdog", -2, "killed by SIGKILL"),
    ("watchdog", "exited", "0", "watchdog", -2, "watchdog"),
    ("exec-condition", "exited", "1", "start-job", 1, "its start condition failed"),
    ("oom-kill", "killed", "TERM", "oom", -15, "out of memory; killed by SIGTERM"),
    ("oom-kill", "killed", "KILL", "oom", -9, "out of memory; killed by SIGKILL"),
    ("start-limit-hit", "", "", "start-job", -1, "systemd's own limit"),
    ("resources", "", "", "resources", -1, "lacked the resources"),
    ("resources", "exited", "1", "resources", -1, "lacked the resources"),
]


@pytest.mark.parametrize(("result", "exit_code", "status", "kind", "code", "line"), TABLE)
def test_the_table_of_systemd(
    result: str, exit_code: str, status: str, kind: str, code: int, line: str
) -> None:
    death = classify(result, exit_code, status)
    assert (death.kind, death.code) == (kind, code)
    assert line in death.line
    assert death.failed


def test_every_word_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} | {"success"} == RESULTS.keys()


@pytest.mark.parametrize(
    ("exit_code", "status"), [("exited", "0"), ("killed", "TERM"), ("killed", "PIPE"), ("", "")]
)
def test_success_is_no_failure(exit_code: str, status: str) -> None:
    assert not classify("success", exit_code, status).failed


def test_one_line_for_people() -> None:
    death = classify("core-dump", "dumped", "SEGV", run_ms=192_000)
    assert death.line == "killed by SIGSEGV (core dumped) after 3 min 12 s"
    assert classify("exit-code", "exited", "1", run_ms=40).line == (
        "exited with status 1 after 40 ms"
    )


@pytest.mark.parametrize(
    ("label", "kind", "code", "reason"),
    [
        ("stale", "stale", -2, "health"),
        ("startup-timeout", "start-timeout", -2, "timeout"),
        ("recovery-timeout", "recovery-timeout", -2, "health"),
        ("unhealthy-too-long", "recovery-timeout", -2, "health"),
        ("invalid-heartbeat", "invalid-heartbeat", -3, "health"),
    ],
)
def test_the_supervisors_labels(label: str, kind: str, code: int, reason: str) -> None:
    death = classify("core-dump", "dumped", "ABRT", label=label)
    assert (death.kind, death.code, death.reason) == (kind, code, reason)
    assert "SIGABRT" in death.line
    # A label is the supervisor's word for its own signals: whatever else ended it was faster.
    assert classify("exit-code", "exited", "78", label=label).kind == "config"
    assert classify("core-dump", "dumped", "SEGV", label=label).kind == "core-dump"
    assert classify("signal", "killed", "TERM", label=label).kind == "signal"
    assert classify("oom-kill", "killed", "KILL", label=label).kind == "oom"
    assert classify("signal", "killed", "KILL", label=label).kind == kind


def test_all_labels_are_tested() -> None:
    assert len(LABELS) == 5
    assert classify("signal", "killed", "KILL", label="pipe-closed").kind == "signal"


@pytest.mark.parametrize("name", ["RTMIN+31", "RTMIN+x", "RTMIN+", "RTMIN+" + "9" * 5000, "SEGV\n"])
def test_signals_that_are_none(name: str) -> None:
    death = classify("signal", "killed", name)
    assert death.code == -1
    assert death.line.isprintable()


def test_stop_and_start_job() -> None:
    death = classify("timeout", "killed", "KILL", stop_asked=True)
    assert (death.kind, death.code, death.failed) == ("stop-timeout", -9, True)
    assert death.line == "did not stop in time; killed by SIGKILL"
    # A failed start job fires the hook with the words of the run before: they are not its own.
    death = classify("signal", "killed", "KILL", start_job=True, run_ms=5)
    assert (death.kind, death.code) == ("start-job", -1)
    assert "SIGKILL" not in death.line


@given(st.text(), st.sampled_from(["exited", "killed", "dumped", "", "x"]), st.text(), st.text())
def test_any_words_give_a_class_and_a_printable_line(
    result: str, exit_code: str, status: str, label: str
) -> None:
    death = classify(result, exit_code, status, label=label)
    assert death.kind
    assert death.line.isprintable()
    assert len(death.line) < 200


def test_what_systemd_shows_is_what_the_hook_is_given() -> None:
    """A realtime signal too: it was −37 by the hook and unknown by systemd's own state."""
    assert exit_words("2", "37") == ("killed", "RTMIN+3")
    assert exit_words("3", "11") == ("dumped", "SEGV")
    assert exit_words("1", "78") == ("exited", "78")
    assert exit_words("", "") == ("", "")
    by_hook = classify("signal", "killed", "RTMIN+3")
    assert classify("signal", *exit_words("2", "37")) == by_hook
    assert by_hook.code == -37
