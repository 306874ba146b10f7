// Calls the driver as fast as it can.
// Usage: gate cost CALLS | gate launch THREADS | gate capture | gate nested
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "stats.h"

static struct Stats* stats;

static void on_alarm(int number) {
    (void)number;
    __atomic_fetch_add(&stats->signals, 1, __ATOMIC_SEQ_CST);
}

// Two calls in turn whose arguments lie in registers of both kinds and on the stack.
static CUresult call_with(uint64_t mark) {
    unsigned first = (unsigned)mark;
    if (mark % 8 == 0)
        return cuTexRefSetMipmapLevelBias((CUtexref)mark, (float)mark);
    return cuLaunchKernel((CUfunction)mark, first + 1, first + 2, first + 3, first + 4, first + 5,
                          first + 6, first + 7, (CUstream)(mark + 8), (void**)(mark + 9),
                          (void**)(mark + 10));
}

static void* launch(void* argument) {
    uint64_t number = 1000 * (uint64_t)argument;
    while (!__atomic_load_n(&stats->stop, __ATOMIC_SEQ_CST)) {
        int mark = (int)(++number);
        errno = mark;
        CUresult result = call_with(number);
        if (result != CUDA_SUCCESS || errno != mark)
            __atomic_fetch_add(&stats->errors, 1, __ATOMIC_SEQ_CST);
        if (number % 8 != 0)
            __atomic_fetch_add(&stats->calls, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static double cost(long calls) {
    struct timespec begin, end; // of this thread: others have the processor meanwhile
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (long i = 0; i < calls; i++)
        cuStreamQuery(NULL);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    double ns = (double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec);
    return ns / (double)calls;
}

// The driver has called the program, which calls the driver.
static void called_back(void* unused) {
    (void)unused;
    while (!__atomic_load_n(&stats->stop, __ATOMIC_SEQ_CST)) {
        cuStreamQuery(NULL);
        __atomic_fetch_add(&stats->launches, 1, __ATOMIC_SEQ_CST);
    }
}

int main(int argc, char** argv) {
    errno = 4711;
    if (argc < 2 || cuInit(0) != CUDA_SUCCESS || errno != 4711 || !(stats = open_stats()))
        return 1;
    if (strcmp(argv[1], "cost") == 0) {
        double best = cost(atol(argv[2]));
        for (int i = 0; i < 9; i++) {
            double ns = cost(atol(argv[2]));
            best = ns < best ? ns : best;
        }
        printf("%f\n", best);
        return 0;
    }
    if (strcmp(argv[1], "capture") == 0) {
        CUstream stream = (CUstream)0x10;
        CUgraph graph;
        char line[16];
        while (fgets(line, sizeof line, stdin)) {
            CUstream which = line[1] == '0' ? NULL : stream;
            CUresult result = line[0] == 'b' ? cuStreamBeginCapture_v2(which, 0)
                                             : cuStreamEndCapture(which, &graph);
            printf("%d\n", result);
            fflush(stdout);
        }
        return 0;
    }
    if (strcmp(argv[1], "nested") == 0) {
        cuLaunchHostFunc(NULL, called_back, NULL);
        __atomic_fetch_add(&stats->calls, 1, __ATOMIC_SEQ_CST);
        return getchar() == EOF ? 0 : 1;
    }
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    int count = atoi(argv[2]);
    if (count == 1) { // signals then meet the thread that waits at the gate
        struct itimerval timer = {{0, 2000}, {0, 2000}};
        setitimer(ITIMER_REAL, &timer, NULL);
        launch(NULL);
        return 0;
    }
    pthread_t threads[64];
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, launch, (void*)(intptr_t)i);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
