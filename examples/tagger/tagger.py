"""A music tagger: each job is the path of a sound file, and its tags are written beside it.

``Tagger`` takes the jobs that ``nomarrctl jobs add`` puts into its pool's queue; ``FolderTagger``
watches a folder and needs no queue. The exception says whether the file or the machine is at fault.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os

import sound
from folder_jobs import FolderJobs

from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.worker.errors import NonFatal, NotReady
from nomarr_systemd.worker.runtime import Waits, Worker

log = logging.getLogger(__name__)

FOLDER = "TAGGER_FOLDER"
FULL = (errno.ENOSPC, errno.EDQUOT)


class Tagger(Worker):
    # Reading the queue is cheap compared with a song: a new job need not wait half a minute.
    idle_waits = Waits(0.1, 1.5, 1.0)

    def load(self) -> None:
        # journald finds the unit of a process at its first line: a first line just before death
        # may come too late for that.
        kinds = "WAV and FLAC" if sound.can_read_flac() else "WAV; FLAC needs python3-soundfile"
        log.info("ready for %s", kinds)

    def process(self, job: str) -> object:
        try:
            tags = sound.measure(job, self.progress)
        except sound.BadSound as error:
            raise NonFatal(str(error)) from error
        except OSError as error:
            raise NonFatal(f"cannot read it: {error.strerror}") from error
        try:
            write_sidecar(job, tags)
        except OSError as error:
            if error.errno in FULL:  # not the fault of this song: release the job and wait
                raise NotReady(f"no room for tags: {error.strerror}") from error
            raise NonFatal(f"cannot write its tags: {error.strerror}") from error
        return tags


class FolderTagger(Tagger):
    """Every new or changed file in the folder that TAGGER_FOLDER names is a job."""

    def source(self) -> FolderJobs:
        folder = os.environ.get(FOLDER, "")
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{FOLDER} is {folder!r}, and that is no folder",
                hint=f'Environment = ["{FOLDER}=/srv/music"] in [pool.NAME.unit]',
            )
        return FolderJobs(folder, "*.wav", "*.flac")


def sidecar_of(path: str) -> str:
    return f"{path}.tags.json"


def write_sidecar(path: str, tags: dict[str, object]) -> None:
    """Write the tags whole or not at all, also if it is killed or the power fails.

    The temporary name is always the same: the next attempt replaces a file that a kill left, and
    no other worker writes one, because a job has one worker at a time.
    """
    directory, name = os.path.split(sidecar_of(path))
    new = os.path.join(directory, f".{name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # it may be a link to something else
    try:
        with open(new, "x", encoding="utf-8") as file:
            json.dump(tags, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, sidecar_of(path))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # the name, too
    finally:
        os.close(fd)
