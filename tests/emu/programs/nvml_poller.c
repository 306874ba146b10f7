// Threads that ask NVML all the time: one by functions that it is linked with, one by functions that
// it has looked up. A library.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees);

static atomic_int ends;
static void* device;
static pthread_t threads[2];
static atomic_long calls[2], failures[2];

typedef int Ask(void*, int, unsigned*);

static void* poll(void* number) {
    const long which = (long)number;
    Ask* ask = 0;
    if (which)
        ask = (Ask*)dlsym(dlopen("libnvidia-ml.so.1", RTLD_NOW), "nvmlDeviceGetTemperature");
    while (!ends) {
        unsigned degrees = 0;
        // By the slot that the loader has filled, not by a copy of it.
        const int result = which ? ask(device, 0, &degrees)
                                 : nvmlDeviceGetTemperature(device, 0, &degrees);
        calls[which]++;
        failures[which] += result != 0 || degrees != 40;
    }
    return 0;
}

int poller_begins(void* of) {
    device = of;
    int failed = 0;
    for (long i = 0; i < 2; i++)
        failed |= pthread_create(&threads[i], 0, poll, (void*)i);
    return failed;
}

long poller_calls(int which) {
    return calls[which];
}

long poller_ends(void) {
    ends = 1;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], 0);
    return failures[0] + failures[1];
}
