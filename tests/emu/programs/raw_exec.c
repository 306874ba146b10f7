// Runs argv[1] without LD_PRELOAD, by the system call itself, as Go's runtime does.
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char** argv) {
    if (argc < 2 || unsetenv("LD_PRELOAD")) return 1;
    syscall(SYS_execve, argv[1], argv + 1, environ);
    return 2;
}
