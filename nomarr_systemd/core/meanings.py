"""What each setting of the configuration file is for, in a line; for the manual. Seconds where a
key ends in ``_s``. Types, bounds and defaults are not repeated here: they are in ``settings``,
``model`` and ``config``.
"""

from __future__ import annotations

from typing import Final

MEANINGS: Final = {
    # [policy]
    "max_restarts": "restarts within the window; the failure after that is one too many",
    "window_s": "the length of the sliding window",
    "max_lifetime_restarts": "restarts in all since the last reset; 0: no such limit",
    "backoff_base_s": "the wait before the first restart",
    "backoff_multiplier": "each further wait is longer by this factor",
    "backoff_max_s": "the longest wait; also that of a restart decided while the store is away",
    "backoff_jitter": "a wait is longer or shorter by up to this share of itself",
    "stable_after_s": "a worker that ran for so long begins with the first wait again",
    "on_exhausted": "when the window is full: mask the unit, or restart when it has room again",
    "never_restart": "exit statuses that no restart mends: the unit is masked at once",
    # [health]
    "frame_interval_s": "a Python worker sends a frame this often",
    "startup_timeout_s": "silence that is allowed while a worker loads",
    "staleness_interval_s": "silence that counts as one miss",
    "max_misses": "so many misses in a row, and the worker is killed",
    "min_recovery_s": "what a worker that says it is recovering gets at least",
    "max_recovery_s": "what it gets at most, from its first word of it",
    "max_unhealthy_s": "a worker that calls itself unhealthy for so long is killed; 0: never",
    "stall_timeout_s": "a Python worker without progress for so long pings no more; 0: it does",
    "snapshot_interval_s": "the supervisor writes the workers' health to the store this often",
    "gpu_health_max_age_s": "what the store says of the GPU is ignored when it is older",
    # [store]
    "url": "a directory on this host, or arangodb+tls://USER@HOST:PORT,HOST:PORT/DATABASE",
    "password_file": "a file with the password for ArangoDB, and nothing else",
    "ca_file": "the certificates to trust for arangodb+tls, instead of the system's",
    "work_user": "another user of ArangoDB, for jobs and history",
    "work_password_file": "a file with the password of work_user",
    # [web]
    "listen": "where a web page is to be served; this version has none",
    # [pool.NAME]
    "workers": "how many there are; they are numbered from 0",
    "entrypoint": "a subclass of nomarr_systemd.worker.runtime.Worker, as package.module:Class",
    "command": "instead of entrypoint: any program that keeps the worker contract",
    "watchdog_s": "systemd kills a worker that sends no WATCHDOG=1 for so long",
    "stop_timeout_s": "how long a worker may take for its job when it is asked to stop",
    "idle_evict_s": "a Python worker idle for so long is to free its models; 0: never",
    "claim_timeout_s": "after so long a job is settled whose worker vanished and nobody saw it",
    "crash_policy": "what becomes of the job in hand when its worker dies",
    "crash_max_retries": "more crashes than this since the last clean stop fail the whole pool",
    "job_max_crashes": "a job that killed so many workers is quarantined",
}
