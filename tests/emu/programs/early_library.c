// Counts in a managed variable, by the host and by a kernel in turn, as managed_variables.cu does.
// Asks the driver what a runtime asks that loads code before it has a context. Where the managed
// variable is, it asks at once ("first") or once the kernel has run ("last"); where the other one
// is, always then. Resets the device in the middle, after which it has to ask for that one again.
// Usage: early_library STEPS first|last; is slow until the file WORKLOAD_HURRY is there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

static const char code[] = ".version 7.0\n"
                           ".target sm_70\n"
                           ".address_size 64\n"
                           ".visible .global .attribute(.managed) .align 4 .u32 counter = 3;\n"
                           ".visible .global .align 4 .u32 plain = 100;\n"
                           ".visible .entry count() {\n"
                           "    .reg .b32 %r<4>;\n"
                           "    ld.global.u32 %r1, [plain];\n"
                           "    ld.global.u32 %r2, [counter];\n"
                           "    add.u32 %r3, %r1, %r2;\n"
                           "    st.global.u32 [counter], %r3;\n"
                           "    ret;\n"
                           "}\n";

static void ok(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
        printf("%s: error %d\n", call, result);
        exit(2);
    }
}

static void have_a_context(void) {
    CUcontext context;
    ok(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    ok(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

static CUdeviceptr managed_of(CUlibrary library) {
    CUdeviceptr found = 0;
    ok(cuLibraryGetManaged(&found, NULL, library, "counter"), "cuLibraryGetManaged");
    return found;
}

int main(int argc, char** argv) {
    CUlibrary library;
    CUkernel kernel;
    CUdeviceptr managed = 0, plain = 0;
    if (argc != 3)
        return 1;
    const int steps = atoi(argv[1]);
    setlinebuf(stdout);
    ok(cuInit(0), "cuInit");
    ok(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), "cuLibraryLoadData");
    if (!strcmp(argv[2], "first"))
        managed = managed_of(library);
    if (managed && (*(volatile int*)managed)++ != 3)
        return 2;
    ok(cuLibraryGetKernel(&kernel, library, "count"), "cuLibraryGetKernel");
    have_a_context();
    for (int step = 1; step <= steps; step++) {
        int added = 0;
        ok(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "launch");
        ok(cuCtxSynchronize(), "cuCtxSynchronize");
        volatile int* counter = (volatile int*)(managed ? managed : managed_of(library));
        if (!managed)
            ++*counter;
        managed = (CUdeviceptr)counter;
        if (!plain)
            ok(cuLibraryGetGlobal(&plain, NULL, library, "plain"), "cuLibraryGetGlobal");
        ok(cuMemcpyDtoH_v2(&added, plain, sizeof added), "cuMemcpyDtoH");
        if (*counter != 4 + 100 * step || added != 100) {
            printf("wrong: step %d, counter %d, %d added\n", step, *counter, added);
            return 1;
        }
        if (step == steps / 2) {
            ok(cuDevicePrimaryCtxReset_v2(0), "cuDevicePrimaryCtxReset");
            have_a_context();
            plain = 0;
        }
        printf("step %d %d\n", step, *counter);
        if (access(getenv("WORKLOAD_HURRY"), F_OK))
            usleep(20000);
    }
    printf("done %d\n", *(volatile int*)managed);
    return 0;
}
