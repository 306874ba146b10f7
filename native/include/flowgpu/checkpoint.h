/* A checkpoint that a program takes of itself, as `flowgpu.checkpoint` of Python (flowgpu/sdk.py
 * says how). Header only: nothing to link with. Without FlowGPU under the program it does nothing.
 *
 *     flowgpu_checkpoint made;
 *     if (flowgpu_checkpoint_take(&made, "image") < 0)
 *         fprintf(stderr, "%s\n", made.error);   // and the program runs on
 */
#ifndef FLOWGPU_CHECKPOINT_H
#define FLOWGPU_CHECKPOINT_H

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef struct flowgpu_checkpoint {
    char ticket[4096];    /* the link that tells what becomes of it; empty: FlowGPU is not there */
    int restored;         /* this is a copy that was restored from the image */
    double stall_seconds; /* for which the program's calls of CUDA had to wait */
    unsigned long long began;
    time_t gone;      /* when the coordinator was last there */
    char error[1024]; /* why it has failed: an error of FlowGPU's as JSON, or of the system */
} flowgpu_checkpoint;

enum { FLOWGPU_FAILED = -1, FLOWGPU_WAITING, FLOWGPU_RUNNING, FLOWGPU_DONE };

static inline int flowgpu_failed_(flowgpu_checkpoint* made, const char* what) {
    snprintf(made->error, sizeof made->error, "%s: %s", what, strerror(errno));
    return FLOWGPU_FAILED;
}

/* When this process began, which is another time in a restored copy; 0 if that cannot be told. */
static inline unsigned long long flowgpu_began_(void) {
    char text[1024];
    FILE* file = fopen("/proc/self/stat", "r");
    if (!file)
        return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char* at = strrchr(text, ')'); /* The second of its words may have spaces. */
    for (int word = 2; at && word < 22; word++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

/* How far it is: FLOWGPU_DONE once the image is complete. */
static inline int flowgpu_checkpoint_state(flowgpu_checkpoint* made) {
    if (!*made->ticket)
        return FLOWGPU_DONE;
    char text[sizeof made->error] = "";
    const ssize_t length = readlink(made->ticket, text, sizeof text - 1);
    const int why = errno;
    /* Asked last: any line above may be where the copy begins. */
    made->restored = flowgpu_began_() != made->began;
    if (made->restored)
        return FLOWGPU_DONE;
    if (length < 0) {
        errno = why;
        return flowgpu_failed_(made, "what became of this checkpoint");
    }
    const char* rest = strchr(text, ' ');
    if (!rest)
        return FLOWGPU_WAITING;
    if (!strncmp(text, "failed ", 7)) {
        snprintf(made->error, sizeof made->error, "%s", rest + 1);
        return FLOWGPU_FAILED;
    }
    if (!strncmp(text, "waiting ", 8)) {
        /* The next coordinator says what became of it; it may be that none comes. */
        const pid_t coordinator = (pid_t)atoi(rest + 1);
        const time_t now = time(NULL);
        if (kill(coordinator, 0) == 0 || errno != ESRCH || !made->gone)
            made->gone = now;
        if (now - made->gone <= 30)
            return FLOWGPU_WAITING;
        return flowgpu_failed_(made, "the coordinator of this job is gone");
    }
    made->stall_seconds = atof(rest + 1);
    return strncmp(text, "done ", 5) ? FLOWGPU_RUNNING : FLOWGPU_DONE;
}

static inline int flowgpu_checkpoint_until_(flowgpu_checkpoint* made, int wanted) {
    const struct timespec look = {0, 1000000};
    int state;
    while ((state = flowgpu_checkpoint_state(made)) != FLOWGPU_FAILED && state < wanted)
        nanosleep(&look, NULL);
    return state;
}

/* Until the image is complete. FLOWGPU_DONE, or FLOWGPU_FAILED with made->error. */
static inline int flowgpu_checkpoint_wait(flowgpu_checkpoint* made) {
    return flowgpu_checkpoint_until_(made, FLOWGPU_DONE);
}

/* Asks the coordinator, and gives the ticket of its answer. */
static inline int flowgpu_ask_(flowgpu_checkpoint* made, int fd, const char* path) {
    char folder[4096] = "", text[3 * 4096], *at = text;
    if (*path != '/' && !getcwd(folder, sizeof folder))
        return flowgpu_failed_(made, "the working folder");
    at += sprintf(at, "{\"verb\": \"checkpoint\", \"leave_running\": true, \"output\": \"");
    for (const char* part = folder; part; part = part == folder ? path : NULL) {
        for (const char* c = part; *c; c++) {
            if (at - text > (long)sizeof text - 16) {
                errno = ENAMETOOLONG;
                return flowgpu_failed_(made, path);
            }
            if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
                at += sprintf(at, "\\u%04x", *c);
            else
                *at++ = *c;
        }
        if (part == folder && *folder)
            *at++ = '/';
    }
    at += sprintf(at, "\"}\n");
    if (send(fd, text, (size_t)(at - text), MSG_NOSIGNAL) != at - text)
        return flowgpu_failed_(made, "the coordinator of this job");
    size_t size = 0;
    while (size < sizeof text - 1 && !memchr(text, '\n', size)) {
        const ssize_t got = recv(fd, text + size, sizeof text - 1 - size, 0);
        if (got <= 0)
            return flowgpu_failed_(made, "the coordinator of this job");
        size += (size_t)got;
    }
    text[size] = 0;
    const char* ticket = strstr(text, "\"ticket\": \"");
    const char* end = ticket ? strchr(ticket + 11, '"') : NULL;
    if (!end || end - ticket - 11 >= (long)sizeof made->ticket) {
        snprintf(made->error, sizeof made->error, "%.*s", (int)sizeof made->error - 1, text);
        return FLOWGPU_FAILED;
    }
    memcpy(made->ticket, ticket + 11, (size_t)(end - ticket - 11));
    return FLOWGPU_WAITING;
}

/* Writes an image of the job that this program is a part of into the folder `path`, absent or
 * empty. Returns once the program can run on: FLOWGPU_RUNNING or FLOWGPU_DONE (in a restored copy,
 * and without FlowGPU), or FLOWGPU_FAILED with made->error. */
static inline int flowgpu_checkpoint_take(flowgpu_checkpoint* made, const char* path) {
    memset(made, 0, sizeof *made);
    made->began = flowgpu_began_();
    const char* task_socket = getenv("FLOWGPU_SOCKET");
    if (!task_socket || !*task_socket)
        return FLOWGPU_DONE;
    struct sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    const char* name = strrchr(task_socket, '/');
    const int folder = name ? (int)(name - task_socket) : 0;
    snprintf(address.sun_path, sizeof address.sun_path, "%.*s/control.sock", folder, task_socket);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int state = FLOWGPU_FAILED;
    if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address) != 0)
        flowgpu_failed_(made, address.sun_path);
    else
        state = flowgpu_ask_(made, fd, path);
    if (fd >= 0)
        close(fd); /* No image could have this connection: the checkpoint begins now. */
    return state == FLOWGPU_FAILED ? state : flowgpu_checkpoint_until_(made, FLOWGPU_RUNNING);
}

#endif
