// Allocates one piece of device memory by functions found on one route, and prints its address.
// Usage: routes linked | dlsym | deepbind | path FILE | proc VERSION FLAGS | proc_v2 VERSION FLAGS
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

typedef CUresult (*Resolver)(const char*, void**, int, cuuint64_t);
typedef CUresult (*Resolver2)(const char*, void**, int, cuuint64_t,
                              CUdriverProcAddressQueryResult*);

static void* library;
static Resolver resolver;
static Resolver2 resolver2;
static int version;
static cuuint64_t flags;

__attribute__((unused)) static void* find(const char* exported, const char* name) {
    void* found = NULL;
    CUdriverProcAddressQueryResult status;
    if (resolver && resolver(name, &found, version, flags) == CUDA_SUCCESS)
        return found;
    if (resolver2 && resolver2(name, &found, version, flags, &status) == CUDA_SUCCESS)
        return found;
    return resolver || resolver2 ? NULL : dlsym(library, exported);
}

__attribute__((unused)) static void check(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}

#define FIND(exported, name) ((__typeof__(&exported))find(#exported, name))

int main(int argc, char** argv) {
    const char* route = argc > 1 ? argv[1] : "";
    CUcontext context;
    CUdeviceptr address = 0;
#ifdef LINKED
    check(cuInit(0), route);
    check(cuDevicePrimaryCtxRetain(&context, 0), route);
    check(cuCtxSetCurrent(context), route);
    check(cuMemAlloc_v2(&address, 1 << 20), route);
#else
    int deep = strcmp(route, "deepbind") ? 0 : RTLD_DEEPBIND;
    const char* file = strcmp(route, "path") ? "libcuda.so.1" : argv[2];
    library = dlopen(file, RTLD_NOW | RTLD_LOCAL | deep);
    if (!library)
        return 2;
    if (argc == 4) {
        version = atoi(argv[2]);
        flags = strtoull(argv[3], NULL, 0);
        if (strcmp(route, "proc") == 0)
            resolver = (Resolver)dlsym(library, "cuGetProcAddress");
        else
            resolver2 = (Resolver2)dlsym(library, "cuGetProcAddress_v2");
    }
    check(FIND(cuInit, "cuInit")(0), route);
    check(FIND(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")(&context, 0), route);
    check(FIND(cuCtxSetCurrent, "cuCtxSetCurrent")(context), route);
    check(FIND(cuMemAlloc_v2, "cuMemAlloc")(&address, 1 << 20), route);
    // A copy by the route's own form, per-thread or not: 4 bytes there and back.
    unsigned sent = 0x12345678, got = 0;
    check(FIND(cuMemcpyHtoD_v2, "cuMemcpyHtoD")(address, &sent, 4), route);
    check(FIND(cuMemcpyDtoH_v2, "cuMemcpyDtoH")(&got, address, 4), route);
    if (got != sent)
        return 3;
#endif
    printf("%#llx\n", (unsigned long long)address);
    fflush(stdout);
    char byte;
    return read(0, &byte, 1) == 0 ? 0 : 4; // until the test has seen what it wants
}
