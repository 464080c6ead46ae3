#!/bin/sh
# A worker in plain sh that takes jobs from the queue of its pool:
#   command = ["/path/to/shell-jobs.sh", "sha256sum"]      nomarrctl jobs add --pool POOL FILE…
# Each job is a path; the program that is named runs on it, and what it prints is the job's result.
# shell-worker.sh explains the frames, README.md the contract, nomarr-worker(7) the jobs.
: "${NOMARRCTL:=nomarrctl}"
frame() {
    printf 'HEALTH|{"component_id":"%s","invocation":"%s","status":"%s"}\n' \
        "$NOMARR_COMPONENT_ID" "$INVOCATION_ID" "$1" >&3
}
is_read() { dd of="$NOMARR_HEALTH_PIPE" oflag=nonblock status=none </dev/null; }

stop=; trap 'stop=1' TERM; trap '' PIPE
is_read || exit 75
exec 3>"$NOMARR_HEALTH_PIPE"
dd oflag=nonblock status=none </dev/null >&3
systemd-notify --ready --status='waiting for jobs'
while [ -z "$stop" ]; do
    frame healthy 2>/dev/null || is_read || exit 75
    systemd-notify WATCHDOG=1
    path=$($NOMARRCTL job take --path --wait 2 3>&-)
    case $? in
        0) ;;
        3) continue ;;              # there is no job
        75) sleep 2 3>&-; continue ;; # the store is away: try again
        *) exit 1 ;;
    esac
    # If this worker dies now, the job is settled by crash_policy, as any worker's.
    if result=$("$@" "$path" 2>&1 3>&-); then
        $NOMARRCTL job done --text "$result" --wait 10 3>&-
    else
        $NOMARRCTL job fail "exit status $?: $result" --wait 10 3>&-
    fi
done
frame stopping 2>/dev/null
exit 0
