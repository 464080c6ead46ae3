"""Frames: what is taken, what is dropped and under which name, in any pieces, within bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nomarr_systemd.core.frames import (
    DROPS,
    MAX_FRAME,
    STATUS_OF_PHASE,
    STATUSES,
    Decoder,
    Frame,
    encode,
    parse_fields,
)
from tests.fuzz_frames import check, feed_both, split
from tests.support.depth import times

ID = "worker:tag:0"
OK = b'HEALTH|{"component_id":"worker:tag:0","status":"healthy"}\n'


def feed(*chunks: bytes) -> tuple[list[Frame], dict[str, int]]:
    """By both decoders, which must agree."""
    frames, decoder = feed_both(ID, *chunks)
    return frames, decoder.drops


def line(**fields: object) -> bytes:
    return b"HEALTH|" + json.dumps({"component_id": ID, **fields}).encode() + b"\n"


def test_the_seeds_frame() -> None:
    frames, drops = feed(
        b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","job":"file123"}\n'
    )
    assert [frame.kind for frame in frames] == ["healthy"]
    assert parse_fields(frames[0].line)["job"] == "file123"
    assert drops == {}


@pytest.mark.parametrize("status", STATUSES)
def test_every_status(status: str) -> None:
    frames, _ = feed(line(status=status))
    assert frames[0].kind == status


@pytest.mark.parametrize(("phase", "status"), STATUS_OF_PHASE.items())
def test_a_phase_alone_stands_for_its_status(phase: str, status: str) -> None:
    assert feed(line(phase=phase))[0][0].kind == status
    assert feed(line(phase=phase, status=None))[0][0].kind == status
    assert feed(line(phase=phase, status="unhealthy"))[0][0].kind == "unhealthy"


def test_recovering_carries_its_wish() -> None:
    assert feed(line(status="recovering", recover_for_s=30))[0][0].recover_for_s == 30
    assert feed(line(status="recovering"))[0][0].recover_for_s is None


def test_unknown_fields_and_phases_are_kept() -> None:
    frames, _ = feed(line(status="healthy", phase="dancing", colour={"deep": [1, None]}))
    assert parse_fields(frames[0].line)["colour"] == {"deep": [1, None]}
    assert parse_fields(frames[0].line)["phase"] == "dancing"


DROPPED = [
    (b"noise\n", "prefix"),
    (b"\n", "prefix"),
    (b"health|{}\n", "prefix"),
    (b"HEALTH{}\n", "prefix"),
    (b"HEALTH|\n", "json"),
    (b"HEALTH|{\n", "json"),
    (b"HEALTH|[]\n", "json"),
    (b"HEALTH|null\n", "json"),
    (OK[:-1] + b"x\n", "json"),
    (OK[:-1] + OK[7:], "json"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":NaN}\n', "json"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":-Infinity}\n', "json"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":1e999}\n', "json"),
    (b"HEALTH|" + b"[" * 4000 + b"\n", "json"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":"\xff"}\n', "encoding"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":"\\ud800"}\n', "encoding"),
    (b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","\\udfff":1}\n', "encoding"),
    (OK.replace(b"tag:0", b"tag:1"), "component"),
    (OK.replace(b'"worker:tag:0"', b"7"), "component"),
    (OK.replace(b"component_id", b"component"), "component"),
    (line(), "status"),
    (line(status="Healthy"), "status"),
    (line(status="dead"), "status"),
    (line(status=1), "status"),
    (line(status=["healthy"]), "status"),
    (line(status=False, phase="idle"), "status"),
    (line(phase="dancing"), "status"),
    (line(phase=["idle"]), "status"),
    (line(status="healthy", phase=1), "field"),
    (line(status="healthy", job=[1]), "field"),
    (line(status="healthy", job=True), "field"),
    (line(status="healthy", seq="1"), "field"),
    (line(status="healthy", seq=1.5), "field"),
    (line(status="healthy", pid=True), "field"),
    (line(status="healthy", invocation=5), "field"),
    (line(status="healthy", progress_age_s="1"), "field"),
    (line(status="recovering", recover_for_s="30"), "field"),
    (line(status="recovering", recover_for_s=True), "field"),
    (line(status="healthy", metrics=[1]), "field"),
    (line(status="healthy", x="y" * MAX_FRAME), "length"),
]


@pytest.mark.parametrize(("bad", "kind"), DROPPED)
def test_dropped_by_kind_and_the_next_frame_is_whole(bad: bytes, kind: str) -> None:
    frames, drops = feed(bad + OK)
    assert drops == {kind: 1}
    assert [frame.line for frame in frames] == [OK[:-1]]
    # Also in two reads, and with the decoder already knowing how this worker's frames begin.
    armed = encode(ID, "healthy", job="a", seq=1, progress_age_s=0.5)
    frames, drops = feed(armed, bad, armed)
    assert (len(frames), drops) == (2, {kind: 1})


def test_every_kind_of_drop_is_tested() -> None:
    assert {kind for _, kind in DROPPED} | {"cut"} == set(DROPS)


def test_white_space_around_the_object_is_fine() -> None:
    assert len(feed(OK[:7] + b"\t \r" + OK[7:-1] + b" \t\r\n")[0]) == 1


@pytest.mark.parametrize("size", [MAX_FRAME - 1, MAX_FRAME, MAX_FRAME + 1, 3 * MAX_FRAME])
def test_the_longest_line(size: int) -> None:
    padding = size - len(line(status="healthy", x=""))
    text = line(status="healthy", x="y" * padding)
    assert len(text) == size
    taken = size <= MAX_FRAME
    for pieces in ([text, OK], [text[:100], text[100:] + OK], [bytes([b]) for b in text + OK]):
        frames, drops = feed(*pieces)
        assert len(frames) == 1 + taken
        assert drops == ({} if taken else {"length": 1})


def test_a_cut_line_is_counted_at_the_end() -> None:
    decoder = Decoder(ID)
    assert decoder.feed(OK[:-5]) == []
    decoder.finish()
    assert decoder.drops == {"cut": 1}
    assert len(decoder.feed(OK)) == 1
    decoder.finish()
    assert decoder.drops == {"cut": 1}


def test_memory_is_bounded_whatever_comes() -> None:
    decoder = Decoder(ID)
    for _ in range(300):
        decoder.feed(b"x" * 65536)
        assert len(decoder._rest) <= MAX_FRAME
    for _ in range(300):
        decoder.feed(b"HEALTH|{" * 8000 + b"\n")
    assert decoder.drops == {"length": 300}
    assert len(decoder.feed(b"y\n" + OK)) == 1


# Lines that differ where the frames of one worker do

TAILS = [
    b"7}",
    b'7,"progress_age_s":1.25}',
    b'7,"progress_age_s":0}',
    b"07}",
    b"-7}",
    b"7.5}",
    b"}",
    b"7}}",
    b"7} ",
    b"7}x",
    b'7,"progress_age_s":01}',
    b'7,"progress_age_s":-1}',
    b'7,"progress_age_s":1.}',
    b'7,"progress_age_s":1e999}',
    b'7,"progress_age_s":"1"}',
    b'7,"status":"unhealthy"}',
    b'7,"x":1}',
    b'"7"}',
    b"7" * 30 + b"}",
    b'7,"x":"' + b"y" * 4000 + b'"}',
    b"\xff}",
]
STEMS = [
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"seq":',
    b'{"component_id":"worker:tag:0",JOB"status":"recovering","recover_for_s":9,"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"metrics":{"a":1,"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"seq":"x","seq":',
    b'{"component_id":"worker:tag:0","status":"healthy","metrics":{JOB"b":2},"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOBJOB"seq":',
    b'{JOB"component_id":"worker:tag:0","status":"healthy","seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"progress_age_s":"x","seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"pid":7,"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"pid":8,"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy","invocation":"a",JOB"seq":',
    b'{"component_id":"worker:tag:0","status":"healthy",JOB"invocation":"b","seq":',
]
JOBS = [
    b"",
    b'"job":"a",',
    b'"job":"/music/a b [c] {d}.flac",',
    b'"job":"",',
    b'"job":"a,\\"seq\\":",',
    b'"job":"\\",',
    b'"job":"\\"job":"x",',
    b'"my\\"job":"x",',
    b'"job":"\x01",',
    b'"job":"\xc3\xbc",',
    b'"job":"\xff",',
    b'"job":"\\ud800",',
    b'"job":7,',
    b'"job":null,',
    b'"job":["x"],',
    b'"job":"x","status":"dead",',
    b'"job":"' + b"y" * 4000 + b'",',
]


def alike(stem: bytes) -> st.SearchStrategy[list[bytes]]:
    """Lines of one stem, which differ where frames of a worker do."""
    line = st.tuples(st.sampled_from(JOBS), st.sampled_from(TAILS)).map(
        lambda parts: b"HEALTH|" + stem.replace(b"JOB", parts[0]) + parts[1] + b"\n"
    )
    return st.lists(line, max_size=8)


@given(st.sampled_from(STEMS).flatmap(alike))
@settings(max_examples=times(300))
def test_a_line_does_not_depend_on_those_before_it(lines: list[bytes]) -> None:
    together, drops = feed(*lines)
    alone = [feed(one) for one in lines]
    apart = [frame for frames, _ in alone for frame in frames]
    assert split(together) == split(apart)
    assert sum(drops.values()) == sum(sum(each.values()) for _, each in alone)
    for frame in together:
        assert parse_fields(frame.line)["component_id"] == ID


# Both decoders: what the one with msgspec takes by itself, the other takes, too

NUMBERS = [
    "0", "-0", "00", "1.0", "1e2", "1E-2", "1e999", "-1e999", "1.", ".5", "+1", "0x1", "1_0", "NaN",
    "Infinity", "-Infinity", "9" * 19, "9" * 20, "-" + "9" * 400, "9" * 320 + ".0", "0.1", "1e-999",
]  # fmt: skip
TEXTS = [
    '""', '"a"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\ude00\\ud83d"', '"\\u0000"', '"\\x"',
    '"\\u12"', '"\t"', '"\x7f"', '"ü"', '"\u2028"', "'a'", '"healthy"', '"worker:tag:0"', '"\\/"',
]  # fmt: skip
BLANKS = ["", " ", "\t", "\r", "\n", "\f", "\v", "\xa0", "\x00", "\ufeff", "//", "x"]


def nest(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


json_texts = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(["null", "true", "false", "[]", "{}", "[1]", '{"a":1.0}', '{"a":{"b":1e999}}']),
    st.sampled_from(
        ['{"\\ud800":1}', '{"a":"\\udfff"}', '{"a":1,"a":[]}', '{"a":NaN}', '{"a":true}']
    ),
    st.integers(28, 36).map(nest),
    st.integers(28, 36).map(lambda depth: "[" * depth + "]" * depth),
)
names = st.sampled_from(
    [
        *("component_id", "status", "phase", "job", "seq", "pid", "invocation", "note", "metrics"),
        *("progress_age_s", "recover_for_s", "own", "", "st\\u0061tus", "line", "kind"),
    ]
)
fields = st.one_of(
    st.tuples(names, json_texts),
    st.tuples(st.just("status"), st.sampled_from([f'"{word}"' for word in STATUSES])),
    st.tuples(st.just("phase"), st.sampled_from([f'"{word}"' for word in STATUS_OF_PHASE])),
)


@given(
    st.lists(fields, max_size=4),
    st.lists(fields, max_size=4),
    st.sampled_from(BLANKS),
    st.tuples(*[st.sampled_from(["", "", "", *BLANKS])] * 3),
)
@settings(max_examples=times(3000))
def test_both_decoders_agree(
    before: list[tuple[str, str]],
    after: list[tuple[str, str]],
    between: str,
    around: tuple[str, str, str],
) -> None:
    """Doubled names, numbers of all kinds, surrogates, nesting, white space, wrong types."""
    own = [("component_id", f'"{ID}"'), ("status", '"healthy"')]
    text = f",{between}".join(f'"{name}":{value}' for name, value in (*before, *own, *after))
    line = f"{around[0]}HEALTH|{around[1]}{{{text}}}{around[2]}\n".encode(errors="surrogatepass")
    feed(line)
    feed(OK, line, OK + line)


# Encoding

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


@given(
    st.sampled_from(STATUSES),
    st.text(max_size=6000) | st.none(),
    st.dictionaries(st.text(max_size=9), st.integers() | st.floats() | st.text(max_size=3000)),
    st.integers(0, 10**12),
    st.dictionaries(st.text(min_size=1, max_size=5).map("own_".__add__), values, max_size=4),
)
def test_what_is_encoded_is_short_enough_and_read_back(
    status: str, job: str | None, metrics: dict[str, Any], seq: int, own: dict[str, Any]
) -> None:
    text = encode(ID, status, job=job, metrics=metrics, seq=seq, progress_age_s=0.5, **own)
    assert len(text) <= MAX_FRAME
    assert text.count(b"\n") == 1
    frames, drops = feed(text)
    assert drops == {}
    assert frames[0].kind == status
    if job and len(job) < 500:
        assert parse_fields(frames[0].line)["job"] == job.encode(errors="replace").decode()
    assert parse_fields(frames[0].line)["seq"] == seq


def test_the_job_keeps_its_end_and_the_required_fields_stay() -> None:
    path = "/music/" + "ü" * 5000 + "/last.flac"
    frame = feed(encode(ID, "healthy", phase="processing", job=path, metrics={"a": 1}, own=2))[0][0]
    said = parse_fields(frame.line)
    assert said["job"].startswith("…")
    assert said["job"].endswith("/last.flac")
    assert said["phase"] == "processing"
    assert said.keys().isdisjoint({"metrics", "own"})
    frame = feed(encode(ID, "healthy", phase="x" * 9000))[0][0]
    assert parse_fields(frame.line) == {"component_id": ID, "status": "healthy"}


def test_a_field_that_is_no_json_is_left_out() -> None:
    frame = feed(encode(ID, "healthy", job="a", metrics={"a": float("nan")}, own=object()))[0][0]
    assert parse_fields(frame.line) == {"component_id": ID, "status": "healthy", "job": "a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("pid", True), ("job", ["a"]), ("job", 3.5), ("seq", "x"), ("metrics", 5), ("phase", 7)],
)
def test_a_field_of_a_wrong_type_is_left_out(name: str, value: object) -> None:
    frames, drops = feed(encode(ID, "healthy", **{name: value}))
    assert (len(frames), drops) == (1, {})
    assert name not in parse_fields(frames[0].line)


def test_a_component_id_that_is_none() -> None:
    with pytest.raises(ValueError, match="is no component id"):
        encode("x" * 5000, "healthy")


def test_a_file_name_that_is_no_utf8() -> None:
    frame = feed(encode(ID, "healthy", job=b"/m/\xff\xfe.flac".decode("utf-8", "surrogateescape")))
    assert parse_fields(frame[0][0].line)["job"] == "/m/??.flac"


def test_a_wrong_status_is_the_programmers_mistake() -> None:
    with pytest.raises(ValueError, match="'fine' is no status; say one of pending"):
        encode(ID, "fine")


@given(st.binary(max_size=9000), st.lists(st.integers(1, 5000), max_size=8))
def test_any_bytes_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    check(data, cuts)
