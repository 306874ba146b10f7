// Calls cuInit and, once told to, one function of the driver by its name.
// Usage: call_one NAME KINDS; a kind for each argument: 'p' is the address of zeroed memory, '0' is
// zero. Prints the result of the call, and ends with its input.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cuda.h>

#define MOST 8

typedef CUresult (*Function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                             uintptr_t, uintptr_t);

int main(int argc, char** argv) {
    static char zeroed[MOST][4096];
    uintptr_t given[MOST] = {0};
    if (argc != 3 || strlen(argv[2]) > MOST || cuInit(0) != CUDA_SUCCESS)
        return 1;
    for (int i = 0; argv[2][i]; i++)
        if (argv[2][i] == 'p')
            given[i] = (uintptr_t)zeroed[i];
    Function function = (Function)dlsym(RTLD_DEFAULT, argv[1]);
    if (!function || getchar() == EOF)
        return 2;
    printf("%d\n", function(given[0], given[1], given[2], given[3], given[4], given[5], given[6],
                            given[7]));
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
