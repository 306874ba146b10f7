// Usage: waits FILE; says "waits", and "waits end" once FILE exists.
#include <stdio.h>
#include <unistd.h>

int main(int argc, char** argv) {
    if (argc < 2) return 1;
    setlinebuf(stdout);
    puts("waits");
    while (access(argv[1], F_OK)) usleep(5000);
    puts("waits end");
    return 0;
}
