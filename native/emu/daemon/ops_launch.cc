// Launches and occupancy.
#include "graph.h"

#include <algorithm>
#include <thread>

namespace flowgpu::emu {

namespace {

constexpr int kMaxThreads = 1024;
constexpr uint32_t kSharedPerBlock = 48u << 10;
constexpr uint32_t kSharedPerProcessor = 164u << 10;
constexpr uint32_t kThreadsPerProcessor = 2048;
constexpr uint32_t kBlocksPerProcessor = 32;
constexpr uint32_t kRegistersPerProcessor = 65536;
constexpr uint32_t kSharedReserved = 1024;
constexpr int kProcessors = 8;

uint64_t threads_of(const LaunchShape& shape) {
    return uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
}

CUresult check_shape(const Function& function, const LaunchShape& shape) {
    const uint64_t threads = threads_of(shape);
    constexpr uint32_t kMostBlocks = 65535;
    const uint32_t shared = function.code->static_shared_bytes + shape.shared;
    for (int i = 0; i < 3; ++i) {
        if (shape.grid[i] == 0 || shape.block[i] == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (shape.grid[0] > INT32_MAX || shape.grid[1] > kMostBlocks || shape.grid[2] > kMostBlocks ||
        threads > kMaxThreads || shape.block[2] > 64 ||
        shape.shared > static_cast<uint32_t>(function.max_dynamic_shared) ||
        shared > kSharedOptIn) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto& required = function.code->required_block;
    if (required[0] != 0 && !std::equal(required.begin(), required.end(), shape.block)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return threads > function.code->max_threads ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

uint32_t blocks_per_processor(const Function& function, uint64_t threads, uint64_t dynamic) {
    const uint64_t rounded = (threads + 31) / 32 * 32;
    const uint64_t shared = function.code->static_shared_bytes + dynamic + kSharedReserved;
    const uint64_t registers = std::max<uint64_t>(function.code->reg_count, 16) * rounded;
    if (threads > kMaxThreads || rounded == 0) {
        return 0;
    }
    return static_cast<uint32_t>(
        std::min<uint64_t>({kBlocksPerProcessor, kThreadsPerProcessor / rounded,
                            kSharedPerProcessor / shared, kRegistersPerProcessor / registers}));
}

CUresult result_of(ptx::Result::Code code) {
    switch (code) {
    case ptx::Result::Code::ok:
    case ptx::Result::Code::cancelled:
        return CUDA_SUCCESS;
    case ptx::Result::Code::illegal_address:
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    case ptx::Result::Code::misaligned_address:
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    case ptx::Result::Code::illegal_instruction:
        return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case ptx::Result::Code::assert_failed:
        return CUDA_ERROR_ASSERT;
    case ptx::Result::Code::launch_failure:
        break;
    }
    return CUDA_ERROR_LAUNCH_FAILED;
}

// What a kernel sees, its context's textures and surfaces included.
class LaunchMemory : public KernelMemory {
  public:
    LaunchMemory(Client& client, const Context& context)
        : KernelMemory(&client.space, &client.mutex, context.device->index), client_(client),
          context_(context) {}

    bool find(uint64_t address, Range* range) override {
        if (KernelMemory::find(address, range)) {
            return true;
        }
        std::lock_guard<std::mutex> lock(client_.mutex);
        std::shared_ptr<Phys> phys = client_.reach_host(address, &range->begin);
        if (phys == nullptr) {
            return false;
        }
        range->end = range->begin + phys->size();
        range->host = phys->host();
        range->writable = true;
        host_.push_back(std::move(phys)); // until the launch ends
        return true;
    }

    const ptx::Image* image(uint64_t number) override {
        std::lock_guard<std::mutex> lock(client_.mutex);
        Held held;
        if (!image_of(client_, context_, number, &held.image, &held.phys)) {
            return nullptr;
        }
        images_.push_back(std::move(held)); // until the launch ends
        return &images_.back().image;
    }

  private:
    struct Held {
        ptx::Image image;
        std::shared_ptr<Phys> phys;
    };
    Client& client_;
    const Context& context_;
    std::list<Held> images_;
    std::vector<std::shared_ptr<Phys>> host_;
};

struct Work {
    std::shared_ptr<Client> client;
    std::shared_ptr<Context> context;
    std::shared_ptr<Module> module;
    const ptx::Function* code;
    uint64_t stream;
    LaunchShape shape;
    std::vector<uint8_t> params;
    std::vector<uint64_t> variables;
};

void log_launch(const Work& work, ptx::WriteLog& writes) {
    std::string line = "{\"pid\": " + std::to_string(work.client->pid) + ", \"kernel\": \"" +
                       work.code->name + "\", \"stream\": " + std::to_string(work.stream) +
                       ", \"writes\": [";
    bool first = true;
    for (const auto& range : writes.ranges()) {
        line += first ? "[" : ", [";
        line += std::to_string(range.addr) + ", " + std::to_string(range.size) + "]";
        first = false;
    }
    work.client->machine->log_writes(line + "]}");
}

void run_kernel(const Work& work) {
    Machine& machine = *work.client->machine;
    if (machine.config().kernel_delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(machine.config().kernel_delay_us));
    }
    LaunchMemory memory(*work.client, *work.context);
    ptx::WriteLog writes;
    ptx::Launch launch;
    std::copy_n(work.shape.grid, 3, launch.grid);
    std::copy_n(work.shape.block, 3, launch.block);
    launch.dynamic_shared = work.shape.shared;
    launch.params = work.params.data();
    launch.variables = work.variables;
    launch.code = work.module->code;
    launch.log = machine.config().write_log.empty() ? nullptr : &writes;
    launch.cancel = &work.context->cancel;
    const ptx::Result result = ptx::launch(*work.module->image->code, *work.code, launch, memory);
    const CUresult error = result_of(result.code);
    if (error != CUDA_SUCCESS) {
        machine.log("kernel " + work.code->name + " failed with " + std::to_string(error) + ": " +
                    result.detail);
        work.context->sticky = error;
    }
    if (launch.log != nullptr) {
        log_launch(work, writes);
    }
}

} // namespace

CUresult check_launch(const Function& function, const LaunchShape& shape) {
    if (const CUresult r = check_shape(function, shape); r != CUDA_SUCCESS) {
        return r;
    }
    const uint64_t blocks = uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2];
    const uint64_t most =
        uint64_t{blocks_per_processor(function, threads_of(shape), shape.shared)} * kProcessors;
    return shape.cooperative != 0 && blocks > most ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
                                                   : CUDA_SUCCESS;
}

std::function<void()> kernel_work(Client& client, const Function& function,
                                  const LaunchShape& shape, std::string_view arguments,
                                  uint64_t stream) {
    auto work = std::make_shared<Work>();
    work->client = client.shared_from_this();
    work->context = function.module->context;
    work->module = function.module;
    work->code = function.code;
    work->stream = stream;
    work->shape = shape;
    work->params.assign(arguments.begin(), arguments.end());
    work->params.resize(function.code->param_bytes);
    work->variables = function.module->kernels_know;
    return [work] { run_kernel(*work); };
}

int32_t op_Launch(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve_function(s, handle, 0, &function); r != CUDA_SUCCESS) {
        return r;
    }
    const auto shape = s.in.take<LaunchShape>();
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->context != function->module->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (const CUresult r = check_launch(*function, shape); r != CUDA_SUCCESS) {
        return r;
    }
    function->loaded = true;
    const std::string_view arguments = s.in.take_blob();
    if (stream->capture != nullptr) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_KERNEL;
        spec.fixed.object = function->handle; // also of a library's kernel
        spec.fixed.shape = shape;
        spec.arguments.assign(arguments.begin(), arguments.end());
        return capture_node(s, *stream, std::move(spec));
    }
    submit(s.client, stream, kernel_work(s.client, *function, shape, arguments, stream->handle));
    return CUDA_SUCCESS;
}

int32_t op_Occupancy(Session& s) {
    const auto which = s.in.take<int32_t>();
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve_function(s, s.in.take<uint64_t>(), 0, &function);
        r != CUDA_SUCCESS) {
        return r;
    }
    const auto count = s.in.take<int32_t>();
    const auto dynamic = s.in.take<uint64_t>();
    if (which == 0) {
        s.out.put(uint64_t{blocks_per_processor(*function, static_cast<uint64_t>(count), dynamic)});
        return CUDA_SUCCESS;
    }
    const uint64_t each = kSharedPerProcessor / static_cast<uint32_t>(count);
    const uint64_t fixed = function->code->static_shared_bytes + kSharedReserved;
    s.out.put(each > fixed ? std::min<uint64_t>(each - fixed, kSharedPerBlock) : uint64_t{0});
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
