/* A worker in C without any library: cc -o c-worker c-worker.c, command = ["/path/to/c-worker"].
 * It does one job of half a second after the other; the contract it keeps is in README.md. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static int health = -1; /* the pipe */

static void on_term(int signal_number) {
    (void)signal_number;
    stop = 1;
}

/* sd_notify: one datagram to the socket that systemd names. */
static void notify(const char *message) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || strlen(path) >= sizeof address.sun_path)
        return;
    strcpy(address.sun_path, path);
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + strlen(path);
    if (path[0] == '@')
        address.sun_path[0] = '\0'; /* an abstract name */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    sendto(fd, message, strlen(message), MSG_NOSIGNAL, (struct sockaddr *)&address, length);
    close(fd);
}

/* One frame; a full pipe drops it. False when the supervisor is gone. */
static int frame(const char *status, long job) {
    static unsigned long seq;
    char line[4096]; /* more is not atomic on a pipe */
    int length = snprintf(line, sizeof line,
        "HEALTH|{\"component_id\":\"%s\",\"status\":\"%s\",\"job\":\"%ld\",\"pid\":%d,\"seq\":%lu}\n",
        getenv("NOMARR_COMPONENT_ID"), status, job, getpid(), ++seq);
    return write(health, line, length) == length || errno != EPIPE;
}

/* The job. A signal does not interrupt it: SIGTERM means to finish it, then exit. */
static void work(void) {
    struct timespec left = {.tv_nsec = 500000000};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

int main(void) {
    const char *path = getenv("NOMARR_HEALTH_PIPE");
    if (!path || !getenv("NOMARR_COMPONENT_ID")) {
        fputs("c-worker: NOMARR_HEALTH_PIPE and NOMARR_COMPONENT_ID are not set\n", stderr);
        return 78; /* configuration: restarting will not help */
    }
    signal(SIGPIPE, SIG_IGN); /* write() returns EPIPE instead */
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_term}, NULL);
    health = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC); /* once, and open for life */
    if (health < 0) {
        int gone = errno == ENXIO || errno == ENOENT;
        perror(path);
        return gone ? 75 : 78;
    }
    frame("pending", 0); /* ... load what the work needs ... */
    notify("READY=1\nSTATUS=working");
    for (long job = 1; !stop; job++) {
        if (!frame("healthy", job))
            return 75;
        work();
        notify("WATCHDOG=1"); /* after each job: proof of progress, not just of life */
    }
    notify("STOPPING=1");
    frame("stopping", 0);
    return 0;
}
