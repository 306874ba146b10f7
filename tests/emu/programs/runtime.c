// Allocates device memory through the CUDA runtime, then by an entry point of the driver that the
// runtime has looked up, and prints both addresses.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>

int main(void) {
    void* memory = NULL;
    void* function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    CUdeviceptr address = 0;
    cudaError_t error = cudaMalloc(&memory, 1 << 20);
    if (error == cudaSuccess)
        error = cudaGetDriverEntryPointByVersion("cuMemAlloc", &function, 12000, cudaEnableDefault,
                                                 &found);
    if (error != cudaSuccess || !function) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        return 1;
    }
    int result = ((CUresult (*)(CUdeviceptr*, size_t))function)(&address, 1 << 20);
    printf("%p 0x%llx\n", memory, address);
    return result;
}
