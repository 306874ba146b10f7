// A CUDA C++ program linked with the static runtime: set up, run, print a digest a step, verify.
// Build: nvcc -cudart static -o cudart_static cudart_static.cu. Options as in _common.py.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error = (call);                                                                \
        if (error != cudaSuccess) {                                                                \
            fprintf(stderr, "failed: %s returned %s\n", #call, cudaGetErrorName(error));           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

namespace {

constexpr int kTable = 64;
constexpr int kThreads = 256;

__constant__ uint32_t table[kTable];
__device__ unsigned long long launches;

struct Options {
    long steps = 100;
    uint32_t seed = 0;
    double step_delay = 0;
    int device = 0;
    bool big = false;
};

__host__ __device__ uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 15)) * 0x9E3779B1u;
    x = (x ^ (x >> 13)) * 0x85EBCA77u;
    return x ^ (x >> 16);
}

__global__ void advance(uint32_t* state, const uint32_t* input, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = mix(state[i] + input[i] + table[i % kTable]);
    if (i == 0)
        launches += 1;
}

// Sums over pairs in double, so that a plain floating-point path is covered too.
__global__ void sums(const uint32_t* state, double* partial, int count) {
    __shared__ double room[kThreads];
    double sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        sum += state[i];
    room[threadIdx.x] = sum;
    __syncthreads();
    for (int width = kThreads / 2; width > 0; width /= 2) {
        if (threadIdx.x < width)
            room[threadIdx.x] += room[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        partial[blockIdx.x] = room[0];
}

uint64_t fnv(uint64_t hash, const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < size; ++i)
        hash = (hash ^ bytes[i]) * 0x100000001B3ull;
    return hash;
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char* value = argv[i + 1];
        if (!strcmp(argv[i], "--steps"))
            options.steps = atol(value);
        else if (!strcmp(argv[i], "--seed"))
            options.seed = static_cast<uint32_t>(atol(value));
        else if (!strcmp(argv[i], "--step-delay"))
            options.step_delay = atof(value);
        else if (!strcmp(argv[i], "--device"))
            options.device = atoi(value);
        else if (!strcmp(argv[i], "--scale"))
            options.big = !strcmp(value, "big");
        else {
            fprintf(stderr, "failed: unknown option %s\n", argv[i]);
            exit(2);
        }
    }
    return options;
}

} // namespace

int main(int argc, char** argv) {
    Options options = parse(argc, argv);
    int count = options.big ? 1 << 22 : 1 << 16;
    size_t size = count * sizeof(uint32_t);
    constexpr int kPartials = 32;
    CHECK(cudaSetDevice(options.device));

    std::vector<uint32_t> constants(kTable), expected(count), found(count);
    for (int i = 0; i < kTable; ++i)
        constants[i] = mix(options.seed * 977u + i);
    for (int i = 0; i < count; ++i)
        expected[i] = i;
    CHECK(cudaMemcpyToSymbol(table, constants.data(), sizeof(uint32_t) * kTable));

    uint32_t *state, *input, *pinned;
    double* partial;
    CHECK(cudaMalloc(&state, size));
    CHECK(cudaMalloc(&input, size));
    CHECK(cudaMalloc(&partial, kPartials * sizeof(double)));
    CHECK(cudaMallocHost(&pinned, size));
    CHECK(cudaMemcpy(state, expected.data(), size, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    cudaEvent_t done;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&done));

    uint64_t all = 0xCBF29CE484222325ull;
    for (long step = 0; step < options.steps; ++step) {
        for (int i = 0; i < count; ++i)
            pinned[i] = mix(options.seed + static_cast<uint32_t>(step) * 0x01000193u + i);
        CHECK(cudaMemcpyAsync(input, pinned, size, cudaMemcpyHostToDevice, stream));
        advance<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(state, input, count);
        CHECK(cudaGetLastError());
        sums<<<kPartials, kThreads, 0, stream>>>(state, partial, count);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(done, stream));
        CHECK(cudaEventSynchronize(done));

        double parts[kPartials], sum = 0, exact = 0;
        unsigned long long runs;
        CHECK(cudaMemcpy(found.data(), state, size, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(parts, partial, sizeof(parts), cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpyFromSymbol(&runs, launches, sizeof(runs)));
        for (int i = 0; i < count; ++i) {
            expected[i] = mix(expected[i] + pinned[i] + constants[i % kTable]);
            exact += expected[i];
        }
        for (double part : parts)
            sum += part;
        // Sums of integers below 2^53 are exact in double, whatever their order.
        if (memcmp(found.data(), expected.data(), size) || sum != exact ||
            runs != static_cast<unsigned long long>(step) + 1) {
            fprintf(stderr, "failed: step %ld: the state, its sum or the launch count is wrong\n",
                    step);
            return 1;
        }
        uint64_t hash = fnv(0xCBF29CE484222325ull, found.data(), size);
        hash = fnv(fnv(hash, parts, sizeof(parts)), &runs, sizeof(runs));
        all = fnv(all, &hash, sizeof(hash));
        printf("step %ld %016llx\n", step, static_cast<unsigned long long>(hash));
        fflush(stdout);
        if (options.step_delay > 0)
            usleep(static_cast<useconds_t>(options.step_delay * 1e6));
    }
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaDeviceReset());
    printf("done %016llx\n", static_cast<unsigned long long>(all));
    return 0;
}
