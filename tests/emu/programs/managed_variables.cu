// Counts in managed variables, by the host and by kernels in turn, for some steps. Resets the
// device in the middle: the variables outlive that. The host looks at one before any kernel runs
// ("first") or not ("last"): the runtime asks the driver for their addresses then.
// Arguments: STEPS first|last.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

__device__ __managed__ int counter = 3;
__device__ __managed__ int table[1000];
__device__ int plain = 1;

__global__ void count(int number) {
    atomicAdd(&counter, number);
    table[threadIdx.x] += plain;
}

__global__ void say() {
    printf("counter %d on the device\n", counter);
}

int main(int, char** words) {
    const int steps = atoi(words[1]);
    if (strcmp(words[2], "first") == 0 && counter != 3) {
        return 3;
    }
    for (int step = 1; step <= steps; ++step) {
        count<<<1, 100>>>(2);
        const cudaError_t error = cudaDeviceSynchronize();
        ++counter;
        if (error != cudaSuccess || counter != 3 + 201 * step || table[99] != step) {
            printf("wrong: step %d, counter %d, table %d, %s\n", step, counter, table[99],
                   cudaGetErrorString(error));
            return 1;
        }
        if (step == steps / 2 && cudaDeviceReset() != cudaSuccess) {
            return 2;
        }
        printf("step %d %d\n", step, counter);
        fflush(stdout);
        const timespec pause = {0, 20000000};
        nanosleep(&pause, nullptr);
    }
    say<<<1, 1>>>();
    printf("done %d\n", cudaDeviceSynchronize() == cudaSuccess ? counter : -1);
    return 0;
}
