// What a program sees of NVML when it is initialised, asked and shut down, on the emulated device: it
// counts who has initialised it, holds a connection of its own, and takes no handle of a device that
// nobody has asked for since. To initialise it takes as long as the file NVML_HELD_BY is there. A
// library; numbers as NVML's (nvmlReturn_t).
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, UNKNOWN = 999 };

static int times, connection = -1, asked_for;

int nvmlInit_v2(void) {
    const char* held_by = getenv("NVML_HELD_BY");
    while (held_by && access(held_by, F_OK) == 0)
        usleep(1000);
    if (times++)
        return SUCCESS;
    struct sockaddr_un name = {AF_UNIX, ""};
    strncpy(name.sun_path, getenv("FLOWGPU_EMU_SOCKET"), sizeof name.sun_path - 1);
    connection = socket(AF_UNIX, SOCK_STREAM, 0);
    return connect(connection, (struct sockaddr*)&name, sizeof name) == 0 ? SUCCESS : UNKNOWN;
}

int nvmlShutdown(void) {
    if (!times)
        return UNINITIALIZED;
    if (!--times) {
        close(connection);
        asked_for = 0;
    }
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = 1;
    return times ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    if (!times || index)
        return times ? INVALID_ARGUMENT : UNINITIALIZED;
    asked_for = 1;
    *device = &asked_for;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) {
    if (!times)
        return UNINITIALIZED;
    if (device != &asked_for || !asked_for || sensor)
        return INVALID_ARGUMENT;
    struct sockaddr_un name;
    *degrees = 40;
    return getpeername(connection, (struct sockaddr*)&name, &(socklen_t){sizeof name}) == 0
               ? SUCCESS
               : UNKNOWN;
}

// More arguments than registers have; NVML's have six at most.
int nvmlSumForTest(int a, int b, int c, int d, int e, int f, int g, int h, void* last) {
    return a + b + c + d + e + f + g + h + *(int*)last;
}

int nvmlEventSetWait_v2(void* set, void* data, unsigned milliseconds) {
    (void)set, (void)data;
    usleep(milliseconds * 1000);
    return SUCCESS;
}
