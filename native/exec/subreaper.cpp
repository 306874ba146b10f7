// Runs the program of a job's first process, which becomes the parent of orphans below it: so they
// stay in the job's tree. The kernel keeps that through exec.
//
//   flowgpu-subreaper PROGRAM NAME [ARGUMENT...]
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/prctl.h>
#include <unistd.h>

int main(int count, char** words) {
    if (count < 3)
        return 2;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    execv(words[1], words + 2);
    fprintf(stderr, "flowgpu: cannot run %s: %s\n", words[1], strerror(errno));
    return errno == ENOENT ? 127 : 126; // as a shell
}
