// Allocates device memory through the CUDA runtime, then by an entry point of the driver that the
// runtime has looked up, and prints both addresses; then, where the entry points lie that the
// runtime finds for either kind of default stream and for the one it was compiled for.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

static cudaError_t look_up(const char* name, unsigned long long flags, void** function) {
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, function, 12000, flags, &found);
    return error == cudaSuccess && found != cudaDriverEntryPointSuccess ? cudaErrorUnknown : error;
}

int main(void) {
    const unsigned long long flags[] = {cudaEnableDefault, cudaEnableLegacyStream,
                                        cudaEnablePerThreadDefaultStream};
    void* memory = NULL;
    void* function = NULL;
    CUdeviceptr address = 0;
    cudaError_t error = cudaMalloc(&memory, 1 << 20);
    if (error == cudaSuccess)
        error = look_up("cuMemAlloc", cudaEnableDefault, &function);
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        return 1;
    }
    int result = ((CUresult (*)(CUdeviceptr*, size_t))function)(&address, 1 << 20);
    printf("%p 0x%llx\n", memory, address);
    for (int i = 0; i < 3 && result == 0; i++) {
        Dl_info where = {0};
        if (look_up("cuStreamSynchronize", flags[i], &function) != cudaSuccess ||
            !dladdr(function, &where))
            return 1;
        printf("%s %s\n", where.dli_fname, where.dli_sname ? where.dli_sname : "?");
    }
    return result;
}
