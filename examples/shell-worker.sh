#!/bin/sh
# A worker in plain sh: command = ["/path/to/shell-worker.sh"]. README.md has the contract.
frame() { printf 'HEALTH|{"component_id":"%s","status":"%s"}\n' "$NOMARR_COMPONENT_ID" "$1" >&3; }
# Fails if the pipe has no reader. sh cannot open a FIFO without waiting; GNU dd can.
is_read() { dd of="$NOMARR_HEALTH_PIPE" oflag=nonblock status=none </dev/null; }

# SIGTERM takes effect after the running command, the job. Without SIGPIPE a lost supervisor only
# fails the write.
stop=; trap 'stop=1' TERM; trap '' PIPE
is_read || exit 75
exec 3>"$NOMARR_HEALTH_PIPE"                  # once, and open for life
dd oflag=nonblock status=none </dev/null >&3  # from now on a full pipe fails instead of waiting
frame pending                                 # ... load what the work needs ...
systemd-notify --ready --status="working${NOMARR_PAST:+; $NOMARR_PAST}"
while [ -z "$stop" ]; do
    frame healthy 2>/dev/null || is_read || exit 75  # no room: drop it; no reader: exit
    sleep "${1:-2}" 3>&-       # the job, without the pipe: shorter than staleness_interval_s (5 s)
    systemd-notify WATCHDOG=1  # after each job: proof of progress, not just of life
done
frame stopping 2>/dev/null
exit 0
